"""What a model weighs and costs, counted from its shape: parameters, bytes of the cache, operations of a token.

Parameters are counted over the tensors that the model's family has on disk (`model.names`), so any config.json that can
be read can be planned for. Operations (FLOPs) count a multiply-add as two; values are bf16, 2 bytes, unless said.
"""

import math
from dataclasses import dataclass

from contraflow.model.families import ModelConfig
from contraflow.model.names import parts

VALUE = 2  # bytes of bf16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model in numbers."""

    config: ModelConfig
    experts: int  # parameters of routed experts, all layers
    rest: int  # all other parameters, embedding and head among them
    embedding: int  # of these, rows that are only looked up: no operations
    latents: bool = False  # the engine keeps latents where the model has them; the native one keeps whole heads

    @classmethod
    def of(cls, config: ModelConfig, *, latents: bool = False) -> "Sizes":
        """Count the parameters of a shape."""
        routed = {
            f"layers.{layer}.mlp.{name}"
            for layer in config.moe_layers
            for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        }
        experts = rest = 0
        for name, found in parts(config).items():
            count = sum(math.prod(part.shape) for part in found)
            experts, rest = (experts + count, rest) if name in routed else (experts, rest + count)
        embedding = 0 if config.tied else config.vocab * config.dim
        return cls(config=config, experts=experts, rest=rest, embedding=embedding, latents=latents)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.experts + self.rest

    @property
    def active_experts(self) -> float:
        """Parameters of routed experts that one token meets."""
        return self.experts * self.config.top_k / self.config.experts if self.config.experts else 0.0

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.active_experts + self.rest - self.embedding

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values (or of latents) that one token of context keeps, windows not counted."""
        c = self.config
        if c.latent is not None and self.latents:
            return VALUE * (c.latent.kv_rank + c.latent.rope_dim) * c.layers
        width = 2 * c.kv_heads * c.head_dim
        return VALUE * width * c.layers

    def read_bytes(self, context: float) -> float:
        """Bytes of the cache that one decoded token reads at a mean context of so many tokens."""
        return self.cache_bytes / self.config.layers * self._seen(context)

    def attention_flops(self, context: float, *, decode: bool) -> float:
        """Operations of one token's scores and sums over a mean context of so many tokens, all layers."""
        c = self.config
        if c.latent is None:
            each = 4 * c.heads * c.head_dim
        elif decode and self.latents:  # queries meet the latents themselves
            each = 2 * c.heads * (2 * c.latent.kv_rank + c.latent.rope_dim)
        else:
            each = 2 * c.heads * (c.head_dim + c.latent.value_dim)
        return each * self._seen(context)

    def _seen(self, context: float) -> float:
        """Tokens seen, summed over layers."""
        windows = len(self.config.window_layers)
        return (self.config.layers - windows) * context + windows * min(context, self.config.window)
