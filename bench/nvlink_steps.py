"""Where the time of the dispatch over NVLink goes: each of its steps by itself, for bench.dispatch_gpu."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch import nvlink_memory as memory

Timer = Callable[[Callable[[], Any]], tuple[Any, Callable[[], float]]]  # a call's result, and its time once it is done


def steps(ground: memory.Ground, inputs: tuple[Tensor, Tensor, Tensor], timed: Timer, turns: int) -> dict[str, Any]:
    """Functions for the microseconds of each step, by name, `turns` each, after five to warm up. Collective."""
    x_TD, ids_TK, weights_TK = inputs
    found: dict[str, list[Callable[[], float]]] = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        result, microseconds = timed(call)
        found.setdefault(name, []).append(microseconds)
        return result

    for _ in range(turns + 5):
        step("push", lambda: ground.push(x_TD, ids_TK, weights_TK, x_TD.dtype))
        step("meet", lambda: ground.meet(memory.OUT))
        _, row_NK, came_S = step("group", ground.group)
        rows = step("look", ground.told)[0]
        y_RD, weights_R = x_TD.new_empty(rows, x_TD.shape[1]), weights_TK.new_empty(rows)
        step("spread", lambda y=y_RD, w=weights_R, r=row_NK, c=came_S: ground.spread(y, w, r, c, x_TD.dtype))
        step("gather", lambda y=y_RD, r=row_NK, c=came_S: ground.gather(y, None, r, c, x_TD.dtype))
        step("meet again", lambda: ground.meet(memory.HOME))
        out_TD = torch.empty_like(x_TD)
        step("pull", lambda out=out_TD: ground.pull(out, None, ids_TK, x_TD.dtype))
    return {name: of[5:] for name, of in found.items()}
