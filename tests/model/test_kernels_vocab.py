"""The first look at logits equals its formula in float64, whatever the vocabulary.

Interpreted: TRITON_INTERPRET=1 pytest tests/model/test_kernels_vocab.py, where Triton is installed.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)]
PART = 128


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "vocab"), [(0, 5), (1, 1), (3, 127), (2, 128), (5, 2048), (3, 2049), (2, 50_304)])
def test_tops_and_masses_are_those_of_each_part(device: str, rows: int, vocab: int) -> None:
    from contraflow.model.kernels_vocab import survey

    noise = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=noise) * 6
    logits[torch.rand(rows, vocab, generator=noise) < 0.3] = -torch.inf
    scales = 0.2 + 3 * torch.rand(rows, generator=noise)
    tops, masses = (x.cpu().double() for x in survey(logits.to(device), scales.to(device), PART))
    assert tops.shape == masses.shape == (rows, -(-vocab // PART))
    for part in range(tops.shape[1]):
        here = logits[:, part * PART : (part + 1) * PART].double()
        top = here.amax(-1)
        assert torch.equal(tops[:, part], top)
        wanted = ((here - top.clamp_min(-1e30)[:, None]) * scales.double()[:, None]).exp().sum(-1)
        torch.testing.assert_close(masses[:, part], wanted, atol=0, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_no_number_shows_in_the_mass_of_its_part_and_nowhere_else(device: str) -> None:
    from contraflow.model.kernels_vocab import survey

    logits = torch.zeros(2, 1000, device=device)
    logits[1, 300] = torch.nan
    _, masses = survey(logits, torch.ones(2, device=device), PART)
    assert masses.isnan().nonzero().tolist() == [[1, 300 // PART]]
