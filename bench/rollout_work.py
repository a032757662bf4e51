"""The work of a rollout at a published model's shape, as lists that any engine can be given: ours and its peers.

A batch is PROMPTS prompts of random ids with EPISODES sequences each, all asked for at once; how many tokens each is
to give is fixed beforehand: the same number for all ("256"), or drawn ("lognormal": mean 512, at most 4,096). One seed
and case, one batch. Knows no engine.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from contraflow.model.families import ModelConfig
from contraflow.types import Int32

SHAPES = {
    "olmoe-1b-7b": ModelConfig(
        family="olmoe", vocab=50304, dim=2048, layers=16, heads=16, kv_heads=16, head_dim=128,
        experts=64, top_k=8, expert_ffn=1024, rope_theta=1e4, context=8192,
    ),
    "qwen3-30b-a3b": ModelConfig(
        family="qwen3_moe", vocab=151936, dim=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
        experts=128, top_k=8, expert_ffn=768, renormalise=True, rope_theta=1e6, norm_eps=1e-6, context=8192,
    ),
    "tiny": ModelConfig(  # for a rehearsal
        family="olmoe", vocab=4096, dim=64, layers=2, heads=4, kv_heads=4, head_dim=16,
        experts=4, top_k=2, expert_ffn=32, context=8192,
    ),
}  # fmt: skip
PROMPT_TOKENS = 256
MEAN, SIGMA, MOST = 512, 1.0, 4096  # of drawn lengths: of the log-normal before it is cut
WARM_UP = "staggered"  # a case too: sequences end one after the other, so that every batch size comes up


class Batch(NamedTuple):
    """Prompts `[P]` of PROMPT_TOKENS ids, and for each its sequences' lengths, `[P, E]`."""

    prompts: list[Int32]
    lengths: list[list[int]]

    @property
    def tokens(self) -> int:
        """To be generated."""
        return sum(map(sum, self.lengths))

    def described(self) -> dict[str, Any]:
        """What tells two batches apart."""
        every = np.array(self.lengths).reshape(-1)
        return {
            "sequences": len(every),
            "tokens": int(every.sum()),
            "median_length": int(np.median(every)),
            "longest": int(every.max()),
            "lengths_sha256": hashlib.sha256(every.astype("<i8").tobytes()).hexdigest()[:12],
        }


def batch(case: str, *, vocab: int, prompts: int, episodes: int, seed: int) -> Batch:
    """The batch of a case: a number of tokens, "lognormal" or "staggered"."""
    draws = np.random.default_rng([seed, sum(case.encode())])
    ids = [draws.integers(1000, vocab - 1000, PROMPT_TOKENS, dtype=np.int32) for _ in range(prompts)]
    count = prompts * episodes
    if case == "lognormal":
        wanted = draws.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count).astype(int).clip(1, MOST)
    elif case == WARM_UP:
        wanted = 2 + np.arange(count) * 64 // count
        wanted[-4:] += np.array([2, 4, 6, 8])[-count:]
    else:
        wanted = np.full(count, int(case))
    return Batch(ids, wanted.reshape(prompts, episodes).tolist())
