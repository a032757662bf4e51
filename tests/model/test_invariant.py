"""A decoder that computes batch-invariantly: the same bits packed, in pages and alone; torch's gradients; refusals."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from contraflow.errors import ConfigError, ModelError
from contraflow.model import invariant as module
from contraflow.model.arithmetic import Arithmetic
from contraflow.model.attention import PackedPlan
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.invariant import Invariant, covered, open_invariant
from contraflow.model.invariant_cpu import built_invariant
from contraflow.model.kinds import FAMILIES
from contraflow.model.logprobs import token_logprobs
from contraflow.model.ops import swiglu
from contraflow.model.paged import KernelPlan
from contraflow.model.router import RouterTape
from contraflow.train.growing import GrowingPlan
from tests.model import pages

Forward = Callable[[Decoder, Sequence[Tensor]], Tensor]
LENGTHS = [21, 1, 8, 33]

if isinstance(built_invariant(), str):
    pytest.skip(str(built_invariant()), allow_module_level=True)


@pytest.fixture(params=covered())
def decoder(request: pytest.FixtureRequest, make_decoder: Callable[..., Decoder]) -> Decoder:
    made = make_decoder(request.param)
    made.compute_with(open_invariant(made.config))
    return made


def paged(decoder: Decoder) -> Callable[..., KernelPlan]:
    """Plans that go to the decoder's own kernels."""
    assert isinstance(decoder.arithmetic, Invariant)
    kernels = decoder.arithmetic.kernels.paging

    def plan(
        cache: KVCache, tables: Tensor, lengths: Tensor, slots: Tensor, queries: Tensor | None = None
    ) -> KernelPlan:
        return KernelPlan(cache, tables, lengths, slots, queries, kernels)

    return plan


def test_covered_are_the_families_of_plain_attention_and_softmax_routers() -> None:
    assert covered() == ["qwen3_moe", "olmoe", "mixtral", "qwen3", "llama"]


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_packed_prefilled_and_decoded_are_the_same_bits(decoder: Decoder, forward: Forward, block_tokens: int) -> None:
    tokens = pages.sequences(LENGTHS)
    with torch.inference_mode():
        packed = forward(decoder, tokens)
        for chunk in (1, 3, 20):
            cached = pages.Pages(decoder, LENGTHS, block_tokens, chunk, paged(decoder))
            assert torch.equal(cached.in_chunks(tokens, chunk), packed)
        assert torch.equal(pages.Pages(decoder, LENGTHS, block_tokens, 1, paged(decoder)).one_by_one(tokens), packed)
        logits = decoder.logits(packed)
        for one, rows, part in zip(tokens, packed.split(LENGTHS), logits.split(LENGTHS), strict=True):
            alone = forward(decoder, [one])
            assert torch.equal(alone, rows)
            assert torch.equal(decoder.logits(alone), part)


def test_threads_of_torch_change_no_bit(decoder: Decoder, forward: Forward) -> None:
    tokens = pages.sequences([300, 200, 250])
    with torch.inference_mode():
        one = forward(decoder, tokens)
        torch.set_num_threads(2)
        try:
            assert torch.equal(forward(decoder, tokens), one)
        finally:
            torch.set_num_threads(1)


def test_torch_alone_does_not_give_the_same_bits(make_decoder: Callable[..., Decoder], forward: Forward) -> None:
    """Or the test above shows nothing."""
    decoder, tokens = make_decoder("qwen3_moe"), pages.sequences(LENGTHS)
    with torch.inference_mode():
        packed = forward(decoder, tokens)
        assert not torch.equal(torch.cat([forward(decoder, [one]) for one in tokens]), packed)


def test_routes_and_log_probabilities_are_the_same_bits_in_any_company(decoder: Decoder) -> None:
    tokens, starts = torch.cat(pages.sequences([13, 7, 18])), [0, 13, 20, 38]
    positions = torch.cat([torch.arange(n) for n in (13, 7, 18)])

    def told(first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        begin, end = starts[first], starts[last]
        tape = RouterTape()
        plan = PackedPlan([start - begin for start in starts[first : last + 1]])
        with torch.no_grad():
            hidden = decoder(tokens[begin:end], positions[begin:end], plan, tape=tape)
            targets = tokens.roll(-1)[begin:end]
            found = decoder.arithmetic.token_logprobs(hidden, decoder.head, targets, temperature=0.7)
        return *found, tape.routes() if tape.used else None

    whole = told(0, 3)
    for place in range(3):
        for together, alone in zip(whole, told(place, place + 1), strict=True):
            assert together is alone is None or (
                alone is not None
                and together is not None
                and torch.equal(together[starts[place] : starts[place + 1]], alone)
            )


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_float64(decoder: Decoder, recompute: bool) -> None:
    wide = copy_of(decoder).double()
    wide.compute_with(InDouble())
    exact, ordinary = loss_and_gradients(wide), loss_and_gradients(copy_of(decoder))
    decoder.recompute = recompute
    found = loss_and_gradients(decoder)
    assert abs(found[0] - exact[0]) <= 1e-6 * 38  # a token; what is added up is of both signs
    for name, wanted in exact[1].items():
        size = wanted.abs().amax().clamp_min(1e-9)
        assert (found[1][name] - wanted).abs().amax() <= 1e-5 * size, name
        assert (found[1][name] - ordinary[1][name]).abs().amax() <= 1e-5 * size, name


class InDouble(Arithmetic):
    """Torch's arithmetic, with a mixture written out, since torch multiplies no groups of float64, and wide logits."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x.double(), weight, bias)

    def mixed(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Any, ordinary: Any) -> Tensor:
        gate_up, down = (weight[ids_TK] for weight in experts)
        hidden = swiglu(torch.einsum("tkfd,td->tkf", gate_up, x_TD))
        return torch.einsum("tkdf,tkf,tk->td", down, hidden, weights_TK)


def copy_of(decoder: Decoder) -> Decoder:
    """The same weights under torch's arithmetic."""
    twin = Decoder(decoder.config)
    twin.load_state_dict(copy.deepcopy(decoder.state_dict()))
    return twin


def loss_and_gradients(decoder: Decoder) -> tuple[float, dict[str, Tensor]]:
    """Of log-probabilities, entropies and the balance loss, so that every path to every weight is pulled on."""
    dtype = decoder.norm.dtype
    decoder.compute_dtype = dtype
    tokens = torch.cat(pages.sequences([13, 7, 18], seed=3))
    positions = torch.cat([torch.arange(n) for n in (13, 7, 18)])
    tape = RouterTape()
    hidden = decoder(tokens, positions, PackedPlan([0, 13, 20, 38]), tape=tape)
    if dtype == torch.float64:
        logs = (hidden @ decoder.head.t() / 0.7).log_softmax(-1)
        logprobs, entropy = logs.gather(1, tokens.roll(-1)[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    else:
        logprobs, entropy = decoder.arithmetic.token_logprobs(hidden, decoder.head, tokens.roll(-1), temperature=0.7)
    weights = torch.linspace(-1, 1, len(tokens), dtype=dtype)
    loss = (weights * logprobs).sum() + 0.3 * entropy.mean()
    if tape.used:
        loss = loss + 0.2 * tape.balance_loss()
    loss.backward()
    named = decoder.named_parameters()
    return loss.item(), {name: weight.grad.double() for name, weight in named if weight.grad is not None}


def test_logits_are_still_those_of_transformers(decoder: Decoder, forward: Forward, tmp_path: Path) -> None:
    save_folder(decoder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    for tokens in pages.sequences([17, 30]):
        with torch.no_grad():
            wanted = model(tokens[None]).logits[0]
            torch.testing.assert_close(decoder.logits(forward(decoder, [tokens])), wanted, rtol=0, atol=1e-4)


def test_log_probabilities_are_those_of_torch(make_decoder: Callable[..., Decoder]) -> None:
    arithmetic = open_invariant(make_decoder("llama").config)
    hidden, head, targets = torch.randn(70, 24), torch.randn(37, 24), torch.randint(0, 37, (70,))
    wanted = token_logprobs(hidden, head, targets, temperature=0.8)
    for found, one in zip(arithmetic.token_logprobs(hidden, head, targets, temperature=0.8), wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
    nothing = arithmetic.token_logprobs(hidden[:0], head, targets[:0])
    assert [len(part) for part in nothing] == [0, 0]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in covered()])
def test_families_with_other_parts_are_refused_by_name(family: str, make_config: Callable[..., ModelConfig]) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.bitwise = true with a {family} model: .*covered are qwen3_moe"):
        open_invariant(make_config(family))


def test_a_machine_without_a_compiler_is_told_what_to_do(
    make_config: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "built_invariant", lambda: "no C compiler: none of cc is on the PATH")
    with pytest.raises(ConfigError, match="no C compiler: none of cc is on the PATH; install a C compiler"):
        open_invariant(make_config("llama"))


def test_a_plan_that_it_has_no_form_for_is_refused(decoder: Decoder) -> None:
    with pytest.raises(ModelError, match="no form for a _Grown"):
        decoder(torch.arange(3), torch.arange(3), GrowingPlan())
