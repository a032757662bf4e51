"""A mixture made from a dense model gives the same logits, and transformers agrees."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from contraflow.errors import ModelError
from contraflow.model.decoder import Decoder
from contraflow.model.families import RopeScaling
from contraflow.model.folder import save_folder
from contraflow.model.upcycle import upcycle, upcycle_folder

Forward = Callable[[Decoder, Sequence[Tensor]], Tensor]
SEQUENCES = [torch.arange(19) * 7 % 40, torch.tensor([3])]
STRETCHED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
DENSE: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"tied": False, "attention_bias": True}),
    ("llama", {"attention_bias": False, "rope_scaling": STRETCHED}),
]


@pytest.mark.parametrize(("family", "changes"), DENSE)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (4, 4), (1, 1)])
def test_logits_are_those_of_the_dense_model(
    family: str,
    changes: dict[str, Any],
    experts: int,
    top_k: int,
    make_decoder: Callable[..., Decoder],
    forward: Forward,
) -> None:
    dense = make_decoder(family, **changes)
    mixture = upcycle(dense, experts=experts, top_k=top_k)
    assert mixture.config.moe_layers == (0, 1)
    with torch.no_grad():
        wanted = dense.logits(forward(dense, SEQUENCES))
        got = mixture.logits(forward(mixture, SEQUENCES))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_tokens_spread_over_the_experts(make_decoder: Callable[..., Decoder]) -> None:
    mixture = upcycle(make_decoder("qwen3"), experts=8, top_k=2)
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(0))
    ids, _ = mixture.layers[0].mlp.router(x, None)
    assert ids.flatten().bincount(minlength=8).min() > 10


def test_the_seed_decides_the_router_and_nothing_else(make_decoder: Callable[..., Decoder]) -> None:
    dense = make_decoder("qwen3")
    one, same, other = (upcycle(dense, experts=4, top_k=2, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert {name for name in one if not torch.equal(one[name], other[name])} == {
        "layers.0.mlp.router.weight",
        "layers.1.mlp.router.weight",
    }


@pytest.mark.parametrize(("family", "changes"), [DENSE[0], DENSE[2]])
def test_a_folder_becomes_one_that_transformers_loads_with_the_same_logits(
    family: str, changes: dict[str, Any], tmp_path: Path, make_decoder: Callable[..., Decoder], forward: Forward
) -> None:
    dense = make_decoder(family, **changes)
    save_folder(dense, tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    upcycle_folder(tmp_path / "dense", tmp_path / "mixture", experts=4, top_k=2)
    assert (tmp_path / "mixture" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "mixture" / "tokenizer.json").unlink()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "mixture", attn_implementation="eager")
    with torch.no_grad():
        wanted = dense.logits(forward(dense, SEQUENCES[:1]))
        torch.testing.assert_close(theirs(SEQUENCES[0][None]).logits[0], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "numbers", "said"),
    [
        ("mixtral", {}, {"experts": 4, "top_k": 2}, "qwen3 and llama models can"),
        ("llama", {}, {"experts": 4, "top_k": 2}, "attention biases"),
        ("qwen3", {}, {"experts": 4, "top_k": 5}, r"top_k = 5 must be in \[1, experts = 4\]"),
        ("qwen3", {}, {"experts": 0, "top_k": 1}, "experts = 0 must be at least 1"),
        ("qwen3", {"ffn": 44}, {"experts": 4, "top_k": 2}, "multiples of 8"),
    ],
)
def test_what_cannot_be_upcycled_is_refused_by_name(
    family: str, changes: dict[str, Any], numbers: dict[str, int], said: str, make_decoder: Callable[..., Decoder]
) -> None:
    with pytest.raises(ModelError, match=said):
        upcycle(make_decoder(family, **changes), **numbers)


def test_a_folder_is_not_upcycled_onto_itself(tmp_path: Path, make_decoder: Callable[..., Decoder]) -> None:
    save_folder(make_decoder("qwen3"), tmp_path)
    with pytest.raises(ModelError, match="is not empty"):
        upcycle_folder(tmp_path, tmp_path / "." / "", experts=4, top_k=2)
