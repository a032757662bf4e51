"""The scalar head: exact numbers and gradients, and a file beside the model's that comes back bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from contraflow.errors import ModelError
from contraflow.model.value import FILE, ValueHead, load_value_head, save_value_head


def drawn(dim: int, *, pull: float = 1.0, seed: int = 0) -> ValueHead:
    head, noise = ValueHead(dim, pull=pull), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(generator=noise)
        head.bias.normal_(generator=noise)
    return head


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_values_are_those_of_float64(tokens: int) -> None:
    head, hidden_TD = drawn(24), torch.randn(tokens, 24, generator=torch.Generator().manual_seed(1))
    wanted_T = hidden_TD.double() @ head.weight.double() + head.bias.double()
    torch.testing.assert_close(head(hidden_TD).double(), wanted_T, rtol=1e-5, atol=1e-6)


def test_a_new_head_says_zero_and_learns_at_once() -> None:
    head, hidden_TD = ValueHead(8), torch.randn(3, 8, dtype=torch.bfloat16)
    values_T = head(hidden_TD)
    assert values_T.dtype == torch.float32
    assert not values_T.any()
    values_T.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.any()


@pytest.mark.parametrize("pull", [0.0, 0.1, 1.0])
def test_pull_scales_the_gradient_below_and_nothing_else(pull: float) -> None:
    hidden_TD = torch.randn(5, 12, generator=torch.Generator().manual_seed(2))
    whole_TD, part_TD = hidden_TD.clone().requires_grad_(), hidden_TD.clone().requires_grad_()
    whole, part = drawn(12), drawn(12, pull=pull)
    values_T, values_part_T = whole(whole_TD), part(part_TD)
    assert torch.equal(values_T, values_part_T)
    values_T.square().sum().backward()
    values_part_T.square().sum().backward()
    assert whole_TD.grad is not None
    assert part_TD.grad is not None
    torch.testing.assert_close(part_TD.grad, pull * whole_TD.grad)
    torch.testing.assert_close(part.weight.grad, whole.weight.grad)
    torch.testing.assert_close(part.bias.grad, whole.bias.grad)


def test_a_head_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    head = drawn(16)
    save_value_head(drawn(16, seed=9), tmp_path)
    save_value_head(head, tmp_path)
    again = load_value_head(tmp_path, 16)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


def test_a_missing_torn_or_foreign_head_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=FILE):
        load_value_head(tmp_path, 16)
    save_value_head(drawn(16), tmp_path)
    with pytest.raises(ModelError, match=r"weight': \[16\].*weight \[8\] and bias \[1\]"):
        load_value_head(tmp_path, 8)
    save_file({"score.weight": torch.zeros(1, 16)}, tmp_path / FILE)
    with pytest.raises(ModelError, match=r"score\.weight"):
        load_value_head(tmp_path, 16)
    (tmp_path / FILE).write_bytes(b"torn")
    with pytest.raises(ModelError, match=FILE):
        load_value_head(tmp_path, 16)
    with pytest.raises(ModelError, match="could not write"):
        save_value_head(drawn(4), tmp_path / "nowhere")
