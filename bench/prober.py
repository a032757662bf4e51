"""A worker that measures its way to another: calls one by one, many at once, and large arrays. Used by ray_overhead."""

import asyncio
import statistics
import time

import numpy as np

from contraflow.runtime.base import Address, Host
from contraflow.runtime.drill import Drill

CALLS, LANES, PAYLOADS, PAYLOAD_MB = 1000, 64, 20, 16
DEADLINE_S = 120.0


class Prober:
    """A worker that measures its way to another one."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def measure(self, address: Address) -> dict[str, float]:
        far = self._host.connect(address)

        async def add() -> float:
            begin = time.perf_counter()
            await far.call(DEADLINE_S, Drill.add, 1)
            return time.perf_counter() - begin

        async def lane() -> None:
            for _ in range(CALLS // LANES):
                await add()

        [await add() for _ in range(200)]
        single = statistics.median([await add() for _ in range(CALLS)])
        begin = time.perf_counter()
        await asyncio.gather(*[lane() for _ in range(LANES)])
        rate = CALLS // LANES * LANES / (time.perf_counter() - begin)
        array = np.ones(PAYLOAD_MB * 250_000, np.float32)
        times = []
        for _ in range(PAYLOADS):
            begin = time.perf_counter()
            await far.call(DEADLINE_S, Drill.size, array)
            times.append(time.perf_counter() - begin)
        return {"call_ms": single * 1e3, "calls_per_s": rate, "mb_per_s": PAYLOAD_MB / statistics.median(times)}


def make_prober(host: Host) -> Prober:
    return Prober(host)
