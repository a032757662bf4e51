"""On GPUs, two processes go through every case bit for bit: with DeepEP on one GPU or two, over NVLink on two."""

import importlib.util

import pytest
import torch

from tests.dispatch import gpu_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
    pytest.mark.timeout(330),
]


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="needs the module deep_ep")
def test_deepep_gives_the_closed_forms_and_the_dense_sum() -> None:
    assert gpu_ranks.main(["--ranks", "2", "--seconds", "240"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["nvlink", "all_to_all"])
def test_two_gpus_give_the_closed_forms_and_the_dense_sum(kind: str) -> None:
    assert gpu_ranks.main(["--ranks", "2", "--kind", kind, "--seconds", "240"])
