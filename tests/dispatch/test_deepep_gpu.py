"""On a GPU with DeepEP: two processes, on one GPU if there is but one, through every case bit for bit."""

import importlib.util

import pytest
import torch

from tests.dispatch import deepep_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="needs the module deep_ep"),
    pytest.mark.timeout(330),
]


def test_two_processes_give_the_closed_forms_and_the_dense_sum() -> None:
    assert deepep_ranks.main(["--ranks", "2", "--seconds", "240"])
