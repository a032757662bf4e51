"""What the trainer tells about a step and about itself; plain numbers that travel between processes and into JSON.

Does not compute anything. Shape letters: M MoE layers, E experts.
"""

from typing import Any

import msgspec

from contraflow.types import Manifest


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """A look at sampled tokens of a take before its step, see docs/mismatch.md."""

    tokens: int  # looked at
    refreshed: int  # of these, conditioned on a cache that an older version began
    unknown: int  # passed over, since the version that sampled them is not kept
    entropy: float  # of the sampling versions, nats a token
    parts: dict[str, dict[str, float]]  # by cause, and of `all` together: see `algo.mismatch.extent`
    routed: int  # fed tokens before these whose experts the engine recorded
    routes_differ: tuple[float, ...]  # [M], share of them that the sampling version sends to another set in the trainer
    host_bytes: int = 0  # of the versions kept


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what went in, what the updates saw, what came out. Every number is finite.

    When `applied` is false the weights are those of before, published again as the step's version; `fault` says why,
    `bad_batch` names the file the batch was written to, and the numbers of the updates are zero. A step without any
    credit to give (no groups, or all advantages zero and no other loss) is applied without an update.
    """

    step: int
    manifest: Manifest
    applied: bool
    fault: str = ""
    bad_batch: str = ""
    groups: int
    episodes: int  # that did not fail
    failed: int
    reward: float  # mean over episodes that did not fail
    parts: dict[str, float]  # the same, by part of the reward
    updates: int  # applied in this step
    trained_tokens: int  # of one pass over the take
    lengths: tuple[int, ...] = ()  # sampled tokens of each episode that was trained
    repetition: float = 0.0  # share of repeated 4-grams in what was sampled, mean over episodes that did not fail
    loss: float  # mean over the updates, as are the numbers below
    kl: float  # k3 estimate to the reference model; 0 without one
    balance: float  # load-balancing loss of the router before its weight; 0 when it has none
    entropy: float  # of the temperature-scaled policy, nats per trained token
    ratio_mean: float  # of the new to the behaviour policy, over trained tokens
    ratio_low: float
    ratio_high: float
    clipped_low: float  # share of tokens whose gradient the lower, the upper clip removed
    clipped_high: float
    behaviour_kl: float  # k3 estimate of KL(behaviour, new)
    ratio_effective: float = 0.0  # effective sample size over sample size, of these ratios as weights
    effective: float = 0.0  # effective sample size over sample size, of the weights that corrections gave
    corrected: dict[str, float] = {}  # share of tokens that each correction masked, or held at a bound
    grad_norm: float  # before clipping
    learning_rate: float  # of the last update
    age_mean: float  # of trained tokens, in steps
    age_max: int
    replayed_tokens: int = 0  # fed tokens, over all updates, that went to recorded experts
    routes_differ: tuple[float, ...] = ()  # [M], share of them that the router would have sent to another set
    first_differs: tuple[float, ...] = ()  # [M], the same for the first choice
    routes_missing: int = 0  # fed tokens whose experts should have come with them and did not
    routes_dropped: int = 0  # samples left out for it
    critic_updates: int = 0  # of the critic, where there is one; the policy's are fewer while that warms up
    value_loss: float = 0.0  # mean over the critic's updates, before any weight
    value_clipped: float = 0.0  # share of tokens whose gradient the bound on values removed
    critic_grad_norm: float = 0.0  # before clipping; where it shares the policy's trunk, of its head alone
    explained_variance: float = 0.0  # of returns, by the values that credit was given with
    values_version: int = -1  # n of the version whose critic gave those; -1 without one
    expert_loads: tuple[tuple[int, ...], ...]  # [M][E] tokens given to each expert, over all updates
    mismatch: Mismatch | None = None  # where this step looked
    seconds: dict[str, float]  # of this step, by cause

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl has of it."""
        left_out = ("manifest", "lengths", "mismatch")
        told = {k: v for k, v in msgspec.structs.asdict(self).items() if k not in left_out}
        return told if self.mismatch is None else told | {"mismatch": msgspec.to_builtins(self.mismatch)}


class TrainReport(msgspec.Struct, frozen=True):
    """The trainer now: what it does, and its seconds by cause since it started; they sum to the wall clock."""

    doing: str
    seconds: dict[str, float]
    steps: int  # done by this process
    refused: int  # of these, not applied, since a loss or gradient was not finite
    updates: int  # optimizer updates applied since the run began
    moved_bytes: int = 0  # to the host and back, where `train.offload` asks for it
    forms: tuple[str, ...] = ()  # how tokens reach experts on other ranks: asked for, chosen, and why
    sent: int = 0  # versions that this rank sent its part of, counted once an engine; of the collective carrier
    skipped: int = 0  # versions that a newer one replaced before any engine asked for them
    failed: int = 0  # transfers that an engine did not take
    fault: str = ""  # of the last of those
