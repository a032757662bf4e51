"""Memory that was lent comes back with every byte, to the same tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.parallel.loan import Loan

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=6),
    seed=st.integers(0, 9),
    turns=st.integers(1, 3),
)
def test_every_byte_comes_back(sizes: list[tuple[int, int]], seed: int, turns: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 100, (n,), generator=noise).to(DTYPES[kind]) for n, kind in sizes]
    before = [tensor.clone() for tensor in tensors]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    loan = Loan(lambda: tensors)
    for _ in range(turns):
        assert loan.lend() == nbytes
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert loan.lent == (nbytes > 0)
        assert loan.take_back() == nbytes
        assert not loan.lent
        for tensor, was in zip(tensors, before, strict=True):
            assert torch.equal(tensor, was)


@pytest.mark.parametrize("device", DEVICES)
def test_views_and_tensors_that_share_memory_move_once_and_stay_views(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs one CUDA device")
    whole = torch.arange(1000.0, device=device)
    view, parameter = whole[10:20].view(2, 5), torch.nn.Parameter(whole[500:])
    loan = Loan(lambda: [whole, view, parameter.detach()])
    assert loan.lend() == whole.nbytes == 4000
    loan.take_back()
    whole += 1
    assert torch.equal(view.cpu(), torch.arange(11.0, 21.0).view(2, 5))
    assert torch.equal(parameter.detach().cpu(), torch.arange(501.0, 1001.0))


def test_lending_twice_moves_once_and_what_was_not_lent_is_not_taken_back() -> None:
    tensor = torch.ones(3)
    loan = Loan(lambda: [tensor])
    assert loan.take_back() == 0
    assert (loan.lend(), loan.lend()) == (12, 0)
    assert (loan.take_back(), loan.take_back()) == (12, 0)
    assert tensor.tolist() == [1, 1, 1]


def test_tensors_made_since_the_last_time_are_lent_too() -> None:
    tensors = [torch.ones(2)]
    loan = Loan(lambda: tensors)
    loan.lend()
    loan.take_back()
    tensors.append(torch.full((5,), 7.0))
    assert loan.lend() == 28
    loan.take_back()
    assert tensors[1].tolist() == [7.0] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_lent_memory_is_free_for_other_processes() -> None:
    tensor = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    loan, (before, _) = Loan(lambda: [tensor]), torch.cuda.mem_get_info()
    loan.lend()
    assert torch.cuda.mem_get_info()[0] >= before + (1 << 27)
    loan.take_back()
    assert int(tensor.sum()) == 1 << 28
