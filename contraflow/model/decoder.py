"""The decoder: one definition for the trainer and the native engine.

Takes token ids, positions and a plan of who sees whom; gives hidden states, and logits from them. Knows no mesh, no
RL, no sampling. On CPU compute in fp32: bf16 there is a hundred times slower.

Shape letters: T tokens fed, D width, V vocabulary, M MoE layers, E experts, K experts per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contraflow.dispatch.base import Dispatch
from contraflow.dispatch.local import LocalDispatch
from contraflow.errors import ModelError
from contraflow.model.arithmetic import Arithmetic, Computing
from contraflow.model.attention import Attention, LayerPlan, Plan
from contraflow.model.families import ModelConfig
from contraflow.model.mla import LatentAttention
from contraflow.model.moe import DenseMLP, MoE
from contraflow.model.ops import cast
from contraflow.model.recompute import recomputed
from contraflow.model.rotary import Rotation, frequencies, turn_gain
from contraflow.model.router import RouterTape, Tape


class Layer(Computing):
    """Attention and feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, **made: Any) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.attention_norm = nn.Parameter(torch.empty(config.dim, **made))
        self.attention = attention
        self.mlp_norm = nn.Parameter(torch.empty(config.dim, **made))
        self.mlp = mlp

    def forward(self, x_TD: Tensor, turn: Rotation, plan: LayerPlan, tape: Tape | None) -> Tensor:
        do = self.arithmetic
        mixed_TD = self.attention(do.rms_norm(x_TD, self.attention_norm, self.eps), turn, plan)
        x_TD, normed_TD = do.add_norm(x_TD, mixed_TD, self.mlp_norm, self.eps)
        out: Tensor = x_TD + self.mlp(normed_TD, tape)
        return out


class Decoder(Computing):
    """A causal language model.

    Parameters are `dtype`, except router and head (and an embedding tied to it), which are fp32. `compute_dtype` is the
    dtype of the residual stream and the matmuls: other weights are cast at use. Norms and softmaxes work in fp32. With
    `recompute` set, a backward pass computes each layer's activations again instead of having kept them; with
    `split_head` set, which needs bf16 compute, log-probabilities are computed as `splithead` says; with `hold_copies`
    set, an update casts weights once, as `copies` says.

    Invariant: parameter names and shapes are a function of the config alone, so weights travel by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype | None = None,
        dispatch: Dispatch[Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype or dtype
        self.recompute = self.split_head = self.hold_copies = self.fused = False
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        shape, fp32 = (config.vocab, config.dim), made | {"dtype": torch.float32}
        self.embed = nn.Parameter(torch.empty(shape, **(fp32 if config.tied else made)))
        self.layers = nn.ModuleList()
        for index in range(config.layers):
            mlp: nn.Module = DenseMLP(config, **made)
            if index in config.moe_layers:
                mlp = MoE(config, dispatch or LocalDispatch(config.experts), **made)
            attention = LatentAttention(config, **made) if config.latent else Attention(config, **made, index=index)
            self.layers.append(Layer(config, attention, mlp, **made))
        self.norm = nn.Parameter(torch.empty(config.dim, **made))
        self.lm_head = None if config.tied else nn.Parameter(torch.empty(shape, **fp32))
        self.signed_d: Tensor
        self.turn_gain = turn_gain(config)
        self.register_buffer("signed_d", None, persistent=False)
        self.make_buffers(device)

    def make_buffers(self, device: torch.device | str) -> None:
        """What is computed from the config, not loaded; called anew after `to_empty`."""
        self.signed_d = frequencies(self.config).to(device)

    @property
    def head(self) -> Tensor:
        """fp32 `[V, D]`: what turns hidden states to logits."""
        return self.embed if self.lm_head is None else self.lm_head

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: Plan,
        *,
        tape: RouterTape | None = None,
        span: range | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, `[T, D]` in `compute_dtype`.

        Args: `tokens_T` and `positions_T` int64 (positions 0-based in each sequence); `tape` an unused RouterTape;
        `span` the layers to run, None for all. A span that begins behind the first layer takes, instead of tokens, the
        `[T, D]` that the layer before it gave; one that ends before the last gives what its last layer gave.
        """
        if tape is not None and tape.used:
            raise ModelError("this router tape already holds a forward pass; give each its own")
        turn = self.arithmetic.rotation(positions_T, self.signed_d, self.compute_dtype, self.turn_gain)
        span = range(len(self.layers)) if span is None else span
        x_TD = tokens_T if span.start else cast(F.embedding(tokens_T, self.embed), self.compute_dtype)
        for index in span:
            layer = self.layers[index]
            if self.recompute and torch.is_grad_enabled():
                x_TD = recomputed(layer, x_TD, turn, plan.layer(index), tape)
            else:
                x_TD = layer(x_TD, turn, plan.layer(index), tape)
        if span.stop < len(self.layers):
            return x_TD
        return self.arithmetic.rms_norm(x_TD, self.norm, self.config.norm_eps)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """fp32 `[T, V]`."""
        return self.arithmetic.linear(cast(hidden_TD, torch.float32), self.head)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in `dtype` inside, whatever the `compute_dtype` outside."""
        before, self.compute_dtype = self.compute_dtype, dtype
        try:
            yield
        finally:
            self.compute_dtype = before

    def fuse(self) -> None:
        """Compile what lies between matmuls from now on: fewer passes over memory, for many tokens on a GPU.

        Rounding differs from the plain form's; experts spread over ranks and heads cut by tensor parallelism stay
        plain where they talk to other ranks.
        """
        self.fused = True
        for module in self.modules():
            if type(module) is Attention or isinstance(module, MoE):
                module.fuse = True
            if isinstance(module, MoE) and isinstance(module.dispatch, LocalDispatch):
                module.dispatch.fuse = True

    def compute_with(self, arithmetic: Arithmetic) -> None:
        """Compute with `arithmetic` from now on, in every module that asks one."""
        for module in self.modules():
            if isinstance(module, Computing):
                module.arithmetic = arithmetic

    def use_dispatch(self, dispatch: Dispatch[Any]) -> None:
        """Send tokens through `dispatch` from now on, in every MoE layer."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.dispatch = dispatch


def new_decoder(config: ModelConfig, *, seed: int, std: float = 0.02, device: torch.device | str = "cpu") -> Decoder:
    """Fresh fp32 weights: norms 1, biases 0, the rest normal with deviation `std`. One seed, one model."""
    decoder = Decoder(config)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.endswith("norm"):
                weight.fill_(1.0)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.normal_(0.0, std, generator=noise)
    return decoder.to(device)
