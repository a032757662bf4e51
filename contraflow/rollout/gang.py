"""The native engine spread over ranks: dp ranks with sequences of their own, each mirrored by its tp ranks.

Rank 0 leads: it deals out requests, tells every rank what to do and hears what came of it. The others sit in
`follow.py`. What a rank computes is `core.py` as if it were alone, except that all ranks run the same forward passes,
because every MoE layer is an exchange between them. A step costs each follower four small messages.

A rank that is gone, silent or failed makes all of them useless, since others may wait for it inside an exchange. Then
every request fails with an error that names it, and whoever made the engine is told.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec
from torch import Tensor

from contraflow.dispatch.placement import Placement
from contraflow.errors import CarrierError, DeadlineExceeded, EngineError, WorkerDied
from contraflow.parallel.layout import place
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.pieces import shapes
from contraflow.rollout.core import EngineCore, Outcome
from contraflow.rollout.deal import Dealer
from contraflow.rollout.engine import EngineReport
from contraflow.rollout.follow import ended, obey
from contraflow.rollout.native import CoreEngine
from contraflow.rollout.orders import Abort, Beat, Broken, Reply, Said, Step, Stop, Submit, Swap, hear
from contraflow.rollout.parts import cutter, share_parts
from contraflow.rollout.placing import Placer
from contraflow.rollout.star import Star
from contraflow.telemetry import Clock
from contraflow.types import Completion, Probe, Request, Version
from contraflow.weights.manifest import check_tensors

BEATS = 4  # signs of life within one deadline, while there is nothing to do
LAST_WORDS_S = 2.0  # how long a broken engine waits for each rank to say what happened to it


class _Flight(msgspec.Struct, frozen=True):
    request: Request
    waiter: object
    dp: int


class GangCore:
    """A `Core` whose work is done by this rank's core and by those of all followers.

    Invariant: every submitted request is in `_flying` until it has its one outcome. Once `_broken`, nothing is told to
    any rank, and everything fails with it.
    """

    def __init__(
        self,
        core: EngineCore,
        star: Star,
        mesh: Mesh,
        *,
        clock: Clock,
        on_broken: Callable[[str], None],
        whole: bool = True,
    ) -> None:
        """`core` is this rank's, made with the peers of the same `star`; `on_broken` is told once, and why.

        `whole`: versions come to this rank whole, to be shared out. If not, each rank has been brought its own part.
        """
        self._core, self._star, self._mesh, self._clock = core, star, mesh, clock
        self._on_broken, self._whole = on_broken, whole
        self._shapes = shapes(core.config)
        self._placer: Placer | None = None
        if core.slots is not None:
            self._placer = Placer(core.slots.sizes, len(core.slots.layers), every=core.section.replace_every)
        self._dp = {rank: place(rank, mesh.parallel).dp for rank in range(mesh.parallel.ranks)}
        self._heads = [rank for rank in star.others if place(rank, mesh.parallel).tp == 0]  # who speak for a dp rank
        self._dealer = Dealer(mesh.parallel.dp)
        self._orders: dict[int, list[Submit | Abort]] = {dp: [] for dp in range(mesh.parallel.dp)}
        self._flying: dict[int, _Flight] = {}
        self._numbers: dict[str, int] = {}  # of the latest request of each id in flight
        self._submitted = 0
        self._outcomes: list[Outcome] = []
        self._reports: dict[int, EngineReport] = {}
        self._longest_stall_s = 0.0
        self._began = clock()  # what all ranks are doing now, or did last
        self._broken: EngineError | None = None

    @property
    def version(self) -> Version | None:
        """See `Core`."""
        return self._core.version

    @property
    def busy(self) -> bool:
        """See `Core`."""
        return bool(self._flying)

    @property
    def patience_s(self) -> float | None:
        """See `Core`: followers end when they hear nothing for a deadline."""
        return None if self._broken else self._star.deadline_s / BEATS

    def check(self, request: Request) -> None:
        """See `Core`. Raises EngineError also when a rank was lost."""
        self._refuse_if_broken()
        self._core.check(request)

    def submit(self, request: Request, waiter: object) -> None:
        """See `Core`."""
        if self._broken:
            self._outcomes.append((waiter, self._broken))
            return
        number, self._submitted = self._submitted, self._submitted + 1
        dp = self._dealer.deal(request)
        self._flying[number] = _Flight(request, waiter, dp)
        self._numbers[request.id] = number
        self._orders[dp].append(Submit(number, request))

    def abort(self, ids: Sequence[str]) -> None:
        """See `Core`. The outcomes come with the next step."""
        for name in ids:
            if name in self._numbers:
                flight = self._flying[self._numbers.pop(name)]
                self._orders[flight.dp].append(Abort(name))

    def take_outcomes(self) -> list[Outcome]:
        """See `Core`."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def step(self) -> None:
        """See `Core`. A fault on any rank breaks the engine."""
        self._began = self._clock()
        try:
            self._step()
        except Exception as fault:  # noqa: BLE001 - whatever it is, ranks are out of step now
            self._break(fault)

    def beat(self) -> None:
        """See `Core`: let the followers know that the leader lives, and find out whether they do."""
        self._began = self._clock()
        try:
            for rank in self._star.others:
                self._star.tell(rank, Beat())
            for rank in self._star.others:
                hear(self._star, rank, Beat)
        except Exception as fault:  # noqa: BLE001 - as in `step`
            self._break(fault)

    def swap(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> float:
        """See `Engine.swap`: all ranks go over to the new version, or none. Raises EngineError when a rank was lost."""
        self._refuse_if_broken()
        self._began = start = self._clock()
        if self._whole:
            check_tensors(tensors, self._shapes, "the version")
        try:
            with self._core.account.charge("swap"):
                for rank in self._star.others:
                    self._star.tell(rank, Swap(version, probe))
                laid = self._lay_out()
                parts = dict(tensors)
                if self._whole:
                    part = cutter(tensors, self._core.config, self._mesh.parallel, laid)
                    parts = share_parts(part, self._core.weights, mesh=self._mesh)
            self._core.swap(version, parts, probe)
            if self._placer is not None:
                self._placer.accept(laid)
        except CarrierError:
            raise
        except Exception as fault:
            raise self._break(fault) from fault
        finally:
            stall = self._clock() - start
            self._longest_stall_s = max(self._longest_stall_s, stall)
        return stall

    def fail(self, error: EngineError) -> None:
        """Give every request in flight `error`."""
        for number in list(self._flying):
            self._land(number, error)

    def report(self) -> EngineReport:
        """See `Core`: sums over dp ranks; version, steps, seconds and what is being done are the leader's."""
        own = self._core.report()
        others = list(self._reports.values())
        sums = {name: getattr(own, name) + sum(getattr(other, name) for other in others) for name in _SUMMED}
        if self._placer is not None:
            told = self._placer
            sums |= {name: getattr(told, name) for name in ("placed", "in_order", "imbalance", "promised")}
        return msgspec.structs.replace(own, **sums, longest_stall_s=self._longest_stall_s)

    def close(self) -> None:
        """Let the followers end. Call it when nothing steps any more; safe to call twice."""
        if not self._broken:
            self._broken = EngineError("the engine is closed")
            for rank in self._star.others:
                with suppress(WorkerDied, DeadlineExceeded):
                    self._star.tell(rank, Stop())
        self._star.close()

    def _step(self) -> None:
        core, star = self._core, self._star
        orders, self._orders = self._orders, {dp: [] for dp in self._orders}
        for rank in star.others:
            star.tell(rank, Step(tuple(orders[self._dp[rank]])))
        obey(core, orders[self._dp[star.rank]])
        core.step()
        outcomes = [*ended(core)]
        with core.account.charge("ranks"):
            for rank in star.others:
                reply = hear(star, rank, Reply)
                if rank in self._heads:
                    self._reports[rank] = reply.report
                    outcomes += reply.ended
        for outcome in outcomes:
            self._land(outcome.number, outcome.completion or EngineError(outcome.error))

    def _lay_out(self) -> list[Placement]:
        """What the slots are to hold from the next version on, by what all ranks measured; nothing without slots."""
        slots = self._core.slots
        if slots is None or self._placer is None:
            return []
        return self._placer.propose(slots.take_loads(self._mesh.world).cpu())

    def _land(self, number: int, value: Completion | EngineError) -> None:
        flight = self._flying.pop(number)
        self._dealer.done(flight.request, flight.dp)
        if self._numbers.get(flight.request.id) == number:
            del self._numbers[flight.request.id]
        self._outcomes.append((flight.waiter, value))

    def _break(self, fault: Exception) -> EngineError:
        """Nothing can be done with these ranks any more."""
        why = self._cause(fault)
        self._broken = EngineError(f"the engine's {self._mesh.parallel.ranks} ranks are of no more use: {why}")
        self._star.close()
        self.fail(self._broken)
        self._on_broken(str(self._broken))
        return self._broken

    def _cause(self, fault: Exception) -> str:
        """What lies behind a fault: it may show itself elsewhere, such as in an exchange with a rank that is gone."""
        if isinstance(fault, WorkerDied | DeadlineExceeded):
            return str(fault)
        waited_s = self._clock() - self._began
        told = []
        said: Said
        for rank in self._star.others:
            try:
                while not isinstance(said := self._star.hear(rank, Said, within_s=LAST_WORDS_S), Broken):
                    pass
                told.append(f"rank {rank} failed: {said.text}")
            except WorkerDied as death:
                return str(death)
            except DeadlineExceeded as silence:
                # A rank that waits for this one is silent too; but then what went wrong here went wrong at once.
                if waited_s >= self._star.deadline_s:
                    return str(silence)
        return "; ".join([f"rank {self._star.rank} failed: {type(fault).__name__}: {fault}", *told])

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise self._broken


_SUMMED = (
    "tokens",
    "fed_tokens",
    "shared_tokens",
    "running",
    "waiting",
    "kv_tokens",
    "kv_tokens_held",
    "preempted",
)  # over dp ranks, in a report


class GangEngine(CoreEngine):
    """An `Engine` over all ranks of a mesh, led from this one."""

    def __init__(self, core: GangCore, leave: Callable[[], None]) -> None:
        """`leave` is called when all is closed: it leaves the process group."""
        super().__init__(core, "thread")
        self._gang, self._leave = core, leave

    async def close(self) -> None:
        """See `Engine`. The followers end too."""
        if self._closed:
            return
        try:
            await super().close()
        finally:
            self._gang.close()
            self._leave()
