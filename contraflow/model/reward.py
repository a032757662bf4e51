"""A reward model: a decoder and a scalar head that says, at its last token, what a whole conversation is worth.

Takes rows of token ids, gives fp32 numbers; as a folder it is a model folder with value_head.safetensors and
reward.json beside the weights, which holds mean and spread of its rewards. Knows no text and no training.
Shape letters: S rows, T packed tokens, D width.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from contraflow.errors import ModelError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.folder import load_folder, save_folder
from contraflow.model.value import ValueHead, load_value_head, save_value_head

FILE = "reward.json"


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward model's own numbers are like: over held-out answers, chosen and rejected ones."""

    mean: float
    std: float

    def normal(self, value: float, clip: float) -> float:
        """`(value - mean) / std`, within [-clip, clip]."""
        return max(-clip, min(clip, (value - self.mean) / self.std))


class RewardModel(nn.Module):
    """`head(decoder(row))` at the row's last token."""

    def __init__(self, decoder: Decoder, head: ValueHead) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """fp32 `[S]`, of rows packed into one pass. Raises: ModelError when one is empty."""
        device = self.decoder.head.device
        starts = [0, *accumulate(len(row) for row in rows)]
        tokens_T = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        positions_T = torch.tensor([place for row in rows for place in range(len(row))], dtype=torch.int64)
        hidden_TD = self.decoder(tokens_T.to(device), positions_T.to(device), PackedPlan.of(starts, device))
        last_S = torch.tensor(starts[1:], dtype=torch.int64) - 1
        scores_S: Tensor = self.head(hidden_TD.index_select(0, last_S.to(device)))
        return scores_S


def save_reward_model(model: RewardModel, scale: Scale, folder: Path) -> None:
    """Write everything but the tokenizer; `reward.json` last, so that a folder that has it is whole."""
    save_folder(model.decoder, folder)
    save_value_head(model.head, folder)
    (folder / FILE).write_bytes(msgspec.json.encode(scale) + b"\n")


def load_reward_model(
    folder: Path, *, device: torch.device | str = "cpu", compute_dtype: torch.dtype | None = None
) -> tuple[RewardModel, Scale]:
    """Raises: ModelError when the folder is no reward model, or not a whole one."""
    scale = read_scale(folder)
    decoder = load_folder(folder, device=device, compute_dtype=compute_dtype)
    return RewardModel(decoder, load_value_head(folder, decoder.config.dim, device=device)), scale


def read_scale(folder: Path) -> Scale:
    """Raises: ModelError."""
    file = folder / FILE
    try:
        scale = msgspec.json.decode(file.read_bytes(), type=Scale)
    except (OSError, msgspec.DecodeError) as fault:
        raise ModelError(
            f"{folder} is no reward model: {file.name}: {fault}; contraflow reward-model RECIPE FOLDER makes one"
        ) from None
    if not scale.std > 0:
        raise ModelError(f"{file}: std = {scale.std}; a reward model that gives all answers the same has no use")
    return scale


def digest_of(folder: Path) -> str:
    """Which reward model it is: 16 hexadecimal digits of a hash of everything that its rewards depend on."""
    whole = hashlib.sha256()
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json", folder / "tokenizer.json", folder / FILE]
    try:
        for path in files:
            with path.open("rb") as file:
                whole.update(f"{path.name}\n".encode() + hashlib.file_digest(file, "sha256").digest())
    except OSError as fault:
        raise ModelError(f"{path} cannot be read: {fault}") from None
    return whole.hexdigest()[:16]
