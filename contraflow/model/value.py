"""A scalar head: what a hidden state is worth, for a critic by the token, for a reward model at the last one.

Takes hidden states after the final norm, gives fp32 numbers; is saved beside a model folder, and read from there. Does
not run the decoder, and has no say in what its numbers mean. Shape letters: T tokens, D width.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from contraflow.errors import ModelError

FILE = "value_head.safetensors"  # beside config.json; transformers and engines do not look at it


class ValueHead(nn.Module):
    """`w h + b`, in fp32 whatever the hidden states are. It begins with zeros: all is worth nothing.

    `pull` is the share of the gradient that goes on to the hidden states: 1 where the decoder below is the head's own,
    less where it is shared with a policy. The head's own gradient is whole.
    """

    def __init__(self, dim: int, *, device: torch.device | str = "cpu", pull: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))
        self.pull = pull

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """fp32 `[T]`."""
        wide_TD = hidden_TD.float()
        if self.pull != 1.0:
            still_TD = wide_TD.detach()
            wide_TD = still_TD + self.pull * (wide_TD - still_TD)  # the difference is exactly 0, its gradient is not
        return wide_TD @ self.weight + self.bias


def save_value_head(head: ValueHead, folder: Path) -> None:
    """Write the head into a model folder, replacing one that is there. Raises: ModelError."""
    waiting = folder / f"{FILE}.partial"
    try:
        save_file({name: weight.detach().cpu() for name, weight in head.named_parameters()}, waiting)
        waiting.replace(folder / FILE)
    except (OSError, SafetensorError) as fault:
        raise ModelError(f"could not write the value head to {folder}: {fault}") from fault


def load_value_head(folder: Path, dim: int, *, device: torch.device | str = "cpu") -> ValueHead:
    """The head in a model folder of width `dim`. Raises: ModelError when there is none, or of another shape."""
    head, file = ValueHead(dim, device=device), folder / FILE
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as fault:
        raise ModelError(f"{file} is no value head: {fault}") from fault
    wanted = dict(head.named_parameters())
    shapes = {name: list(tensor.shape) for name, tensor in found.items()}
    if shapes != {name: list(tensor.shape) for name, tensor in wanted.items()}:
        raise ModelError(f"{file} holds {shapes}, a value head of this model is weight [{dim}] and bias [1]")
    with torch.no_grad():
        for name, tensor in found.items():
            wanted[name].copy_(tensor)
    return head
