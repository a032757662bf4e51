"""The runtime over a cluster (`runtime.kind = "ray"`): processes on any machine, called over sealed channels.

Calls and payloads go worker to worker. On each machine a warden (warden.py) looks after the workers there, and is asked
from here what they do and who ended; a machine whose warden is gone is lost with all its workers. See docs/ray.md.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from contraflow.errors import ClusterError, ContraflowError, DeadlineExceeded, WorkerDied
from contraflow.runtime.base import OWNER, Address, Gang, Rendezvous
from contraflow.runtime.channel import Caller
from contraflow.runtime.cluster import Cluster, Machine, Reservation, knock
from contraflow.runtime.gang import RefGang
from contraflow.runtime.housed import HousedRuntime, pack_plan
from contraflow.runtime.pools import Berths, plan_berths
from contraflow.runtime.process import Control, Setup
from contraflow.runtime.seal import new_key
from contraflow.runtime.status import STALE_S
from contraflow.runtime.tenant import Berth, Keeper, Tenant
from contraflow.runtime.warden import Stacks, Warden, make_warden
from contraflow.runtime.watch import DUMP_S, LOOK_S
from contraflow.telemetry import Clock

W = TypeVar("W")

ANSWER_S = 1.0  # for a warden to say what its workers do; it may be late, but not for `hang_s`
LISTEN_S = 10.0  # of one question for the next end
HEADLESS_S = 20.0  # of a head that says nothing; after 60 s Ray ends this process
PLACING = 0.75  # of a start's time, to wait for a place
WARDEN_S = 60.0  # for a machine's warden to start


class RemoteRuntime(HousedRuntime[Tenant]):
    """Workers on the machines of a cluster, which is joined with the first start and left with `close`.

    Invariant: every tenant that entered is in the view of the warden of its machine.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        threads: int = 1,
        clock: Clock = time.monotonic,
        start_s: float = 120.0,
        stop_s: float = 10.0,
        hang_s: float = 60.0,
        gpu_pools: Collection[str] = (),
    ) -> None:
        """See `LocalRuntime`; `gpu_pools` are those of which each worker takes a GPU. `folder` is this machine's."""
        self._key = new_key()
        self._context = zmq.Context()
        caller = Caller(self._context, owner=OWNER, identity=OWNER, trouble=self._trouble, key=self._key)
        super().__init__(caller, start_s=start_s, stop_s=stop_s)
        self._cluster, self._threads, self._clock, self._hang_s = cluster, threads, clock, hang_s
        self._stacks, self._gpu_pools = folder / "stacks", gpu_pools
        self._keepers: dict[str, asyncio.Future[Keeper]] = {}
        self._joined: asyncio.Future[None] | None = None
        self._headless_s = 0.0
        self._lost: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    async def start_gang(self, name: str, size: int, factory: Callable[..., W], /, **kwargs: Any) -> Gang[W]:
        """See `Runtime.start_gang`. The ranks meet at a TCP port of rank 0's machine."""
        return RefGang(await self._launch(name, [f"{name}-{r}" for r in range(size)], factory, kwargs, "tcp"))

    async def next_death(self) -> WorkerDied:
        """See `Runtime.next_death`. Raises ClusterError once the cluster's head is gone: nothing starts any more."""
        death = asyncio.ensure_future(self._deaths.get())
        try:
            await asyncio.wait([death, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                await self._lost
            return death.result()
        finally:
            death.cancel()

    async def stacks(self, name: str = "") -> Sequence[Path]:
        """See `Runtime.stacks`. Workers that are stopped, and machines that do not answer, have none to give."""
        houses = {h.number: h for h in self._all() if h.watched and name in ("", h.name)}
        found = await asyncio.gather(*[self._ask_stacks(keeper, list(houses)) for keeper in self._present()])
        texts = {number: stacks.text for stack in found for number, stacks in stack.items() if stacks.text}
        return [self._keep(houses[number], text) for number, text in texts.items()]

    async def machines(self) -> list[Keeper]:
        """A keeper of every machine that a worker may live on: those that offer a processor or a pool."""
        try:
            async with asyncio.timeout(self._start_s):
                await self._join()
                able = [m for m in await self._cluster.machines() if any(m.offers.get(kind) for kind in _kinds(m))]
                return list(await asyncio.gather(*[self._keeper(machine) for machine in able]))
        except TimeoutError:
            raise DeadlineExceeded(OWNER, "a warden on every machine", self._start_s) from None

    async def close(self) -> None:
        """See `Runtime.close`. Raises like `stop`, once everything is gone."""
        if self._watch:
            self._watch.cancel()
        try:
            await self._stop(self._all())
        finally:
            await asyncio.gather(*[house.leave(willing=False) for house in self._all()])
            await asyncio.gather(*[self._dismiss(keeper) for keeper in self._present()])
            self._keepers.clear()
            for task in list(self._tasks):
                task.cancel()
            if self._joined and not self._joined.cancel() and self._joined.exception() is None:
                self._joined = None
                await self._cluster.leave()
            self._caller.close()
            self._context.destroy(linger=0)

    async def _join(self) -> None:
        self._joined = self._joined or asyncio.ensure_future(self._cluster.join())
        await asyncio.shield(self._joined)

    def _build(
        self, members: Sequence[str], factory: Callable[..., Any], kwargs: Mapping[str, Any], meeting: str
    ) -> list[Tenant]:
        role = members[0] if not meeting else members[0].rpartition("-")[0]
        berth = Berth(lambda: self._reserve(role, len(members)))

        async def move_in(tenant: Tenant) -> None:
            endpoint, files = await self._find_place(tenant)
            place = {}
            if meeting:
                place = {"rendezvous": Rendezvous(tenant.rank, len(members), await asyncio.shield(berth.meeting))}
            plan = pack_plan(tenant.name, factory, {**kwargs, **place})
            setup = self._setup(Address(tenant.name, endpoint), files, plan, threads=self._threads)
            assert tenant.process is not None
            assert tenant.keeper is not None
            tenant.process.live(setup, tenant.keeper.pid)
            tenant.address = setup.address

        pack_plan(members[0], factory, kwargs)  # what cannot be sent is refused before it costs a place
        self._born += len(members)
        first = self._born - len(members) + 1
        return [
            Tenant(name, number=first + rank, rank=rank, berth=berth, caller=self._caller, move_in=move_in)
            for rank, name in enumerate(members)
        ]

    async def _reserve(self, name: str, size: int) -> tuple[Berths, Reservation]:
        machines = await self._cluster.machines()
        berths = plan_berths(name, size, [machine.offers for machine in machines], self._gpu_pools)
        return berths, await self._cluster.reserve(berths, PLACING * self._start_s)

    async def _find_place(self, tenant: Tenant) -> tuple[str, str]:
        """Have a process for a tenant, seen by its machine's warden: its endpoint, and the path of its files."""
        await self._join()
        berths, reservation = await tenant.berth.reserved()
        bundle = berths.bundle_of(tenant.rank)
        keeper = await self._keeper_on(reservation.machines[bundle])
        tenant.process = process = reservation.start(bundle)
        door = await process.open(keeper.host, self._key.public, keeper.folder)
        files = f"{keeper.folder}/{tenant.number}"
        await keeper.warden.call(WARDEN_S, Warden.watch, tenant.number, door.pid, files)
        tenant.keeper = keeper
        if tenant.rank == 0:
            host = f"[{keeper.host}]" if ":" in keeper.host else keeper.host
            tenant.berth.meeting.set_result(f"tcp://{host}:{door.port}")
        return door.endpoint, files

    def _setup(self, address: Address, files: str, plan: bytes, *, threads: int) -> Setup:
        return Setup(
            address=address,
            files=files,
            threads=threads,
            clock=self._clock,
            environment={},  # a machine has its own
            graves=tuple(self._graves),
            plan=plan,
            key=self._key,
        )

    async def _keeper_on(self, machine: str) -> Keeper:
        for known in await self._cluster.machines():
            if known.id == machine:
                return await self._keeper(known)
        raise ClusterError(f"machine {machine} left the cluster just after it was given to a worker; try again")

    async def _keeper(self, machine: Machine) -> Keeper:
        """The warden of a machine, started with the first worker there."""
        if machine.id not in self._keepers:
            self._keepers[machine.id] = asyncio.ensure_future(self._start_warden(machine))
        keeper = self._keepers[machine.id]
        try:
            return await asyncio.shield(keeper)
        except BaseException:
            if keeper.done():
                self._keepers.pop(machine.id, None)  # the next worker there may have more luck
            raise

    async def _start_warden(self, machine: Machine) -> Keeper:
        process = self._cluster.start_on(machine.id)
        door = await process.open(machine.host, self._key.public, "")
        keeper = Keeper(machine, door, self._caller, process)
        plan = pack_plan(keeper.address.worker, make_warden, {"folder": door.folder})
        process.live(self._setup(keeper.address, f"{door.folder}/warden", plan, threads=0), 0)
        await keeper.control.call(WARDEN_S, Control.ready)
        self._spawn(self._listen(keeper))
        return keeper

    def _present(self) -> list[Keeper]:
        """Keepers of machines that are there."""
        started = [k for k in self._keepers.values() if k.done() and not k.cancelled() and not k.exception()]
        return [keeper for keeper in (future.result() for future in started) if not keeper.lost]

    async def _listen(self, keeper: Keeper) -> None:
        """Hear of every end on a machine as it comes."""
        while not keeper.lost:
            try:
                ends = await keeper.warden.call(LISTEN_S + ANSWER_S, Warden.ends, keeper.known, LISTEN_S)
            except DeadlineExceeded:
                continue  # whether the machine is lost is found out by looking
            except WorkerDied:
                return
            keeper.known += len(ends)
            for end in ends:
                for tenant in [tenant for tenant in self._all() if tenant.number == end.number]:
                    tenant.end(end)

    async def _watch_all(self) -> None:
        """Look at every machine, and for the head, from time to time."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.gather(self._look_for_head(), *[self._look(keeper) for keeper in self._present()])

    async def _look_for_head(self) -> None:
        host, port = self._cluster.head
        answer = await knock(host, port)
        self._headless_s = 0.0 if answer else self._headless_s + LOOK_S
        if not self._lost.done() and (answer is False or self._headless_s >= HEADLESS_S):
            self._lost.set_exception(
                ClusterError(
                    f"the cluster's head at {host}:{port} is gone, and nothing can be started without it; when it is"
                    " back, resume the run: it goes on from its newest cut"
                )
            )

    async def _look(self, keeper: Keeper) -> None:
        try:
            statuses = await keeper.warden.call(ANSWER_S, Warden.look)
            keeper.silent_s = 0.0
        except DeadlineExceeded:
            keeper.silent_s += ANSWER_S
            return await self._doubt(keeper)
        for tenant in [tenant for tenant in self._all() if tenant.watched and tenant.number in statuses]:
            status = statuses[tenant.number]
            if status.leaving and not tenant.noticed:
                tenant.noticed = True
                self._notices.put_nowait(tenant.name)
            hung = tenant.patient.look(self._clock(), status, self._hang_s)
            tenant.trouble = tenant.patient.trouble(STALE_S)
            if hung and tenant.keeper is keeper:
                found = (await self._ask_stacks(keeper, [tenant.number])).get(tenant.number, Stacks(why="it is gone"))
                tenant.kill(f"{hung}; its stacks: {self._keep(tenant, found.text) if found.text else found.why}")

    async def _doubt(self, keeper: Keeper) -> None:
        """A warden does not answer: its machine is lost if it refuses, or is silent for too long."""
        host, _, port = keeper.address.endpoint.partition("#")[0].removeprefix("tcp://").rpartition(":")
        if await knock(host.strip("[]"), int(port)) is False:
            keeper.lost = f"nothing of the run is left on its machine {keeper.host}: its Ray ended, or it was killed"
        elif keeper.silent_s >= self._hang_s:
            keeper.lost = f"its machine {keeper.host} has not answered for {keeper.silent_s:.0f} s"
        else:
            return
        self._keepers = {
            machine: found
            for machine, found in self._keepers.items()
            if not (found.done() and not found.cancelled() and not found.exception() and found.result() is keeper)
        }
        self._caller.bury(keeper.address.endpoint, WorkerDied(keeper.address.worker, keeper.lost))
        for tenant in [tenant for tenant in self._all() if tenant.keeper is keeper]:
            tenant.lose()

    async def _ask_stacks(self, keeper: Keeper, numbers: list[int]) -> dict[int, Stacks]:
        try:
            return await keeper.warden.call(DUMP_S + ANSWER_S, Warden.stacks, numbers)
        except (DeadlineExceeded, WorkerDied):
            return {}

    def _keep(self, tenant: Tenant, text: str) -> Path:
        path = self._stacks / f"{tenant.name}-{tenant.number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    async def _dismiss(self, keeper: Keeper) -> None:
        try:
            await keeper.control.call(self._stop_s, Control.stop)
        except ContraflowError:
            keeper.process.kill()

    def _trouble(self, address: Address) -> str:
        return next((tenant.trouble for tenant in self._all() if tenant.address == address), "")

    def _clean(self, tenant: Tenant) -> None:
        if all(mate.ended.done() for mate in self._all() if mate.berth is tenant.berth):
            tenant.berth.release()


def _kinds(machine: Machine) -> list[str]:
    return [kind for kind in machine.offers if kind == "CPU" or kind.startswith("contraflow_")]
