"""Ray as a cluster: the only module that knows it. Finds places, starts processes, says which machine is which.

No call and no payload of a worker goes through Ray. A run that is given no cluster by RAY_ADDRESS starts one on this
machine, with a token of its own, and ends it. Raises ClusterError for all that Ray cannot do.
"""

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from contraflow.errors import ClusterError
from contraflow.runtime.actor import Actor, Door
from contraflow.runtime.cluster import Machine, Process, in_thread, knock
from contraflow.runtime.pools import POOLS, Berths, resource
from contraflow.runtime.process import Setup

STORE_BYTES = 80 << 20  # Ray's least: nothing of ours goes there
PLENTY = 10_000.0  # workers of each pool on a machine of one's own
LEAVE_S = 20.0  # for Ray's own processes to end


class _Body(Actor):
    """An actor whose process ends with its life."""

    def live(self, setup: Setup, keeper: int) -> None:
        super().live(setup, keeper)
        ray.actor.exit_actor()


class RayProcess:
    """See `Process`."""

    def __init__(self, **place: Any) -> None:
        """`place`: where and of what, as options of a Ray actor."""
        made = ray.remote(_Body).options(num_cpus=0, max_restarts=0, max_task_retries=0, **place)
        self._actor = made.remote()

    async def open(self, host: str, callers: bytes, folder: str) -> Door:
        try:
            door: Door = await asyncio.wrap_future(self._actor.open.remote(host, callers, folder).future())
        except RayError as fault:
            raise ClusterError(f"Ray has no process for a worker on {host}: {_brief(fault)}") from fault
        return door

    def live(self, setup: Setup, keeper: int) -> None:
        self._actor.live.remote(setup, keeper).future().add_done_callback(lambda ended: ended.exception())

    def kill(self) -> None:
        _aside(ray.kill, self._actor)


class RayReservation:
    """A placement group. See `Reservation`."""

    def __init__(self, group: PlacementGroup, berths: Berths) -> None:
        self._group, self._one = group, berths.one
        nodes = placement_group_table(group)["bundles_to_node_id"]
        self.machines: Sequence[str] = [nodes[bundle] for bundle in range(len(berths.bundles))]

    def start(self, bundle: int) -> Process:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        own = {name: amount for name, amount in self._one.items() if name not in ("CPU", "GPU")}
        return RayProcess(resources=own, num_gpus=self._one.get("GPU", 0), scheduling_strategy=strategy)

    def release(self) -> None:
        _aside(remove_placement_group, self._group)


class RayCluster:
    """The Ray at RAY_ADDRESS, or one of this process's own. See `Cluster`."""

    def __init__(self, address: str) -> None:
        """`address`: `HOST:PORT` of a head, or empty for a Ray of one's own."""
        self._address = address
        self.head = ("", 0)

    async def join(self) -> None:
        if ray.is_initialized():
            raise ClusterError(
                "this process has joined a Ray already; a run joins and leaves by itself: ray.shutdown()"
            )
        address = self._address
        if address:
            await _check_address(address)
        elif os.environ.get("RAY_AUTH_MODE", "token") != "token":
            raise ClusterError(
                f"RAY_AUTH_MODE = {os.environ['RAY_AUTH_MODE']!r}: anybody on this machine's network could run code by"
                " the Ray of this run; leave it out, or set 'token'"
            )
        else:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray leaves one in the home folder
        own = (
            {} if address else {"include_dashboard": False, "object_store_memory": STORE_BYTES, "resources": _offers()}
        )
        try:
            # In this thread, which stays: Ray's processes end with the one that started them (PR_SET_PDEATHSIG).
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except Exception as fault:  # Ray raises Exception itself, for a start that took too long
            hint = f"; {address} answers, so is RAY_AUTH_TOKEN the token of its head?" if address else ""
            raise ClusterError(f"Ray at {address or 'this machine'} cannot be joined: {_brief(fault)}{hint}") from fault
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self.head = (host.strip("[]"), int(port))

    async def machines(self) -> list[Machine]:
        nodes = await in_thread(ray.nodes)
        return [Machine(n["NodeID"], n["NodeManagerAddress"], n["Resources"]) for n in nodes if n["Alive"]]

    async def reserve(self, berths: Berths, within_s: float) -> RayReservation:
        strategy = "STRICT_SPREAD" if berths.spread else "PACK"
        group = await in_thread(lambda: placement_group(list(berths.bundles), strategy=strategy))
        try:
            if await in_thread(group.wait, within_s):
                return await in_thread(RayReservation, group, berths)
            raise ClusterError(
                f"no machine of the cluster has {berths.bundles[0]} free, {len(berths.bundles)} times, for"
                f" {within_s:g} s; {'each on another machine; ' if berths.spread else ''}see `ray status`"
            )
        except BaseException:
            _aside(remove_placement_group, group)
            raise

    def start_on(self, machine: str) -> Process:
        return RayProcess(scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False))

    async def leave(self) -> None:
        """A head that is gone keeps nobody: what Ray has not done within `LEAVE_S`, the end of this process does."""
        await asyncio.wait({asyncio.ensure_future(in_thread(ray.shutdown))}, timeout=LEAVE_S)


async def _check_address(address: str) -> None:
    """Raise ClusterError unless a head listens there and tokens are asked for."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise ClusterError(f"RAY_ADDRESS = {address!r}: write HOST:PORT of the head, as `ray start --head` prints it")
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ClusterError(
            f"RAY_AUTH_MODE = {os.environ.get('RAY_AUTH_MODE', '')!r}: without tokens anybody who reaches {address}"
            " runs code there; start its head with RAY_AUTH_MODE=token, and set the same and its RAY_AUTH_TOKEN here"
        )
    if not await knock(host.strip("[]"), int(port)):
        raise ClusterError(f"RAY_ADDRESS = {address!r}: nobody listens there; start the head, or correct the address")


def _offers() -> dict[str, float]:
    return {resource(pool): PLENTY for pool in POOLS.values()}


def _aside(function: Callable[..., object], *args: Any) -> None:
    """Ask Ray for something that nobody waits for: it may be done already, and a head that is gone never answers."""

    def ask() -> None:
        with suppress(RayError, ValueError, RuntimeError):  # it is gone already, or all of Ray is
            function(*args)

    if ray.is_initialized():  # or Ray would start another one to ask
        threading.Thread(target=ask, daemon=True).start()


def _brief(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0]
