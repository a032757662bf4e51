"""Experts' matrices in float8 on their way: e4m3 values, and an fp32 scale for each 128 of them along a row.

Takes weights in any dtype, gives what is published in their place, and back again in bf16. The way there and back is a
function of the weight alone, so a trainer can compute a version's proof with the very weights an engine will hold.
(DeepSeek-V3 report, section 3.3: blocks of 1 x 128.) Lossy: what an engine samples with is not what is trained.
Shape letters: E experts, O rows of each, D width, Q blocks of 128 of a row.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.dispatch.wire import BLOCK, E4M3, quantise
from contraflow.errors import CarrierError
from contraflow.weights.manifest import SCALES


def lowered(name: str, weight_EOD: Tensor) -> dict[str, Tensor]:
    """What is published of a weight: e4m3 `[E, O, D]` by its name, fp32 `[E, O, Q]` by its name and `SCALES`."""
    width = weight_EOD.shape[-1]
    values_NQb, scales_NQ = quantise(weight_EOD.detach().flatten(0, -2))
    values_ND = values_NQb.flatten(1)[:, :width]
    return {name: values_ND.reshape(weight_EOD.shape), name + SCALES: scales_NQ.unflatten(0, weight_EOD.shape[:-1])}


def raised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors as an engine takes them: what has scales in bf16, all else as it is.

    Raises: CarrierError for scales that fit no float8 tensor.
    """
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
    for name in tensors.keys() - whole.keys():
        of, scales = name.removesuffix(SCALES), tensors[name]
        values = whole.get(of)
        if values is None or values.dtype != E4M3 or scales.shape != _blocks(values):
            raise CarrierError(f"tensor {name!r}, {list(scales.shape)}, holds the scales of no float8 tensor {of!r}")
        whole[of] = _product(values, scales)
    return whole


def _blocks(values: Tensor) -> torch.Size:
    return torch.Size((*values.shape[:-1], -(-values.shape[-1] // BLOCK)))


def _product(values: Tensor, scales: Tensor) -> Tensor:
    width = values.shape[-1]
    padded = F.pad(values.float(), (0, scales.shape[-1] * BLOCK - width)).unflatten(-1, (-1, BLOCK))
    whole: Tensor = (padded * scales[..., None]).flatten(-2)[..., :width]
    return whole.to(torch.bfloat16).contiguous()
