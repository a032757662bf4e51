"""Functions made into few kernels: what lies between matrix products is bound by memory, so passes over it count.

Takes a pure function of tensors; gives one that computes the same, compiled by torch when it is first called with
inputs of a new kind. Worth it on a GPU and for many tokens; needs a C++ compiler. Does not choose what to compile.
"""

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], wanted: bool = True) -> Callable[P, R]:
    """The compiled form of `function`, one for all its callers; `function` itself unless `wanted`."""
    return cast(Callable[P, R], _compiled(function)) if wanted else function


@cache
def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function)
