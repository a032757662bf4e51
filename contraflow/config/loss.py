"""The objective of a run, and how credit is given."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contraflow.config.base import Count, Section

CorrectionName = Literal["tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "age_mask"]
Bound = Annotated[float, Field(ge=0)]
Whole = Annotated[int, Field(ge=0)]


class Loss(Section):
    """The policy objective."""

    advantages: Literal["grpo", "dr_grpo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline", "gae"] = (
        "grpo"  # see docs/algorithms.md
    )
    surrogate: Literal["ppo", "ppo_dual_clip", "gspo", "cispo", "reinforce"] = "ppo"  # see docs/algorithms.md
    old: Literal["behaviour", "proximal"] = "behaviour"  # ratios are to who sampled, or to the policy at step's start
    clip_low: Annotated[float, Field(gt=0)] = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: Annotated[float, Field(gt=0)] = 0.2  # larger than clip_low is DAPO's "clip higher"
    dual_clip: Annotated[float, Field(gt=1)] = 3.0  # bound of `ppo_dual_clip` where the advantage is negative
    corrections: dict[CorrectionName, tuple[Bound, Bound]] = {}  # of old samples, by name: [low, high]
    reduction: Literal["token", "sequence", "constant"] = "token"  # what every token's share of the loss is
    constant_tokens: Count = 1024  # by which `constant` divides every episode
    overlong: tuple[Whole, Whole] = (0, 0)  # answers of these lengths lose 0 to 1 reward; [0, 0]: none
    truncated: Literal["train", "mask"] = "train"  # episodes that the budget cut off
    kl_weight: Annotated[float, Field(ge=0)] = 0.0  # to the model the run began with; 0 keeps no reference copy
    kl_kind: Literal["k1", "k2", "k3"] = "k3"  # estimate of the KL
    kl_in: Literal["loss", "reward"] = "loss"  # where it counts
    entropy_weight: Annotated[float, Field(ge=0)] = 0.0  # bonus for the policy's entropy
    balance_weight: Annotated[float, Field(ge=0)] = 0.0  # load-balancing loss of the router

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for name, (low, high) in self.corrections.items():
            if low > high:
                raise ValueError(f"corrections.{name} = [{low}, {high}]: the first bound is the lower one")
        twice = {"tis", "sequence_tis"} & set(self.corrections)
        if twice and self.old == "behaviour" and self.surrogate != "reinforce":
            raise ValueError(
                f"corrections.{min(twice)} with old = 'behaviour' and surrogate = {self.surrogate!r}: the surrogate has"
                " the ratio to the sampling policy in it, and it would count twice; use old = 'proximal'"
            )
        if self.kl_weight and self.kl_in == "reward" and self.advantages in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(
                f"kl_in = 'reward' with advantages = {self.advantages!r}: these compare whole episodes and know no "
                "rewards of tokens; use kl_in = 'loss', or 'reinforce++_baseline'"
            )
        if self.overlong != (0, 0) and self.overlong[1] <= self.overlong[0]:
            raise ValueError(
                f"overlong = {list(self.overlong)}: the second length is where 1 is lost, and greater than the first;"
                " [0, 0] for none"
            )
        return self

    @property
    def compares(self) -> bool:
        """Whether an episode's credit is relative to those of the same task."""
        return self.advantages in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
