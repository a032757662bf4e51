"""An engine whose tokens other programs make: vLLM or SGLang servers behind the generation seam.

Takes requests and versions; gives completions whose every token is of a version that its server was proven to hold
before and after. A refresh parks what is in flight with the tokens it has, brings the servers to the new weights by
their own interfaces, proves them, and lets each go on from its last token: so spans are exact, and no token is made
by weights that failed. Knows no API: that is a `Dialect`. Which server, and its mending, is `fleet.py`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.errors import EngineError, ServerError
from contraflow.model.families import ModelConfig
from contraflow.rollout.dialect import Piece
from contraflow.rollout.engine import EngineReport, check_request
from contraflow.rollout.fleet import Fleet, Release, Server, check_stamp
from contraflow.rollout.flight import Flight, Received
from contraflow.rollout.release import Releases
from contraflow.rollout.scaled import prove_scaled
from contraflow.telemetry import Account, Clock
from contraflow.types import Completion, Probe, Request, StopReason, Version

_TRIES = 3  # failures of servers in a row that one request outlives


class ServedEngine:
    """An `Engine` over servers.

    Invariants: `_flying` has an entry per running `generate`; `_reading` those whose server is at work. While `_gate`
    is closed nothing is asked of a server but by `swap`, and `version` changes only then and with `_reading` empty.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        section: EngineSection,
        config: ModelConfig,
        folder: Path,
        *,
        clock: Clock,
        version: Version | None = None,
        on_broken: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`folder` is the model's, whose weights are `version`'s if they may be served as they are. `on_broken` is told
        when no server is left, and why."""
        self.version = version
        self._section, self._config, self._clock = section, config, clock
        self._releases = Releases(config, folder, Path(section.server.folder) if section.server.folder else None)
        current = None if version is None else Release(version, folder, None)
        self._fleet = Fleet(servers, section, current=current, on_broken=on_broken)
        self._account = Account(clock, "idle")
        self._gate, self._parked, self._swapping = asyncio.Event(), asyncio.Condition(), asyncio.Lock()
        self._gate.set()
        self._flying: dict[str, Flight] = {}
        self._reading: set[Flight] = set()
        self._tasks: set[asyncio.Task[float]] = set()
        self._tokens = self._fed = self._pieces = self._swaps = 0
        self._longest_stall_s = 0.0
        self._closed = False

    async def generate(self, request: Request) -> Completion:
        """See `Engine`. Raises ServerError if servers failed it too often."""
        self._check(request)
        flight = self._flying[request.id] = Flight(request, self._section.context_tokens, self._section.on_refresh)
        self._settle()
        try:
            while (stop := await self._advance(flight)) is None:
                pass
        finally:
            del self._flying[request.id]
            self._settle()
        return flight.completion(stop)

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Engine`."""
        self._refuse_if_closed()
        for flight in [self._flying[i] for i in ids if i in self._flying]:
            flight.aborted = True
            flight.park()

    async def swap(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> float:
        """See `Engine`. The tensors are not needed once this returns: servers load from folders of our own."""
        self._refuse_if_closed()
        task = asyncio.create_task(self._swap(version, tensors, probe))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineError("the engine is closed") from None
            raise

    def report(self) -> EngineReport:
        """See `Engine`. A step is a piece of a completion; what the servers' caches hold is not known here."""
        return EngineReport(
            version=self.version,
            tokens=self._tokens,
            fed_tokens=self._fed,
            steps=self._pieces,
            running=len(self._reading),
            waiting=len(self._flying) - len(self._reading),
            swaps=self._swaps,
            longest_stall_s=self._longest_stall_s,
            seconds=self._account.seconds(),
            doing=self._account.cause,
            faults=dict(self._fleet.faults),
        )

    async def close(self) -> None:
        """See `Engine`. Stops the servers that were started for it."""
        if self._closed:
            return
        self._closed = True
        self._gate.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._park()
        await self._fleet.close()
        await asyncio.to_thread(self._releases.close)

    async def _swap(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> float:
        async with self._swapping:
            await self._fleet.ready()
            folder = await asyncio.to_thread(self._releases.write, version, tensors)
            began = self._clock()
            self._gate.clear()
            self._settle()
            try:
                await self._park()
                await self._fleet.serve(Release(version, folder, probe))
                self.version = version
                self._swaps += 1
            finally:
                stall_s = self._clock() - began
                self._longest_stall_s = max(self._longest_stall_s, stall_s)
                current = self._fleet.current
                self._gate.set()
                self._settle()
                await asyncio.to_thread(self._releases.keep, [] if current is None else [current.folder])
            return stall_s

    async def _park(self) -> None:
        """End every piece with the tokens it has; return when each is vouched for, or thrown away."""
        for flight in self._reading:
            flight.park()
        async with self._parked:
            await self._parked.wait_for(lambda: not self._reading)

    async def _advance(self, flight: Flight) -> StopReason | None:
        """One piece of a completion, on one server; why the completion is at its end, if it is."""
        server = await self._server(flight)
        if flight.aborted:
            return StopReason.ABORTED
        version = self.version
        assert version is not None  # checked before, and a swap never takes it away
        piece = flight.piece(version)
        self._reading.add(flight)
        server.taken += 1
        self._pieces += 1
        self._fed += len(piece.prompt) - 1
        self._settle()
        try:
            await self._scaled(server, flight.request.temperature)
            received = await self._read(server, flight, piece)
            self._refuse_if_closed()
            await self._vouched(server, received, version)
            flight.add(received, version)
            server.mends = flight.tries = 0
        except ServerError as fault:
            flight.tries += 1
            if fault.kind == "refused" or flight.tries >= _TRIES:
                self._fleet.faults[fault.kind] += 1
                raise
            self._fleet.suspect(server, fault)
            return None
        finally:
            server.taken -= 1
            self._reading.discard(flight)
            self._settle()
            async with self._parked:
                self._parked.notify_all()
        return flight.ended or (StopReason.ABORTED if flight.aborted else None)

    async def _server(self, flight: Flight) -> Server:
        """A server to go on with, once that is allowed."""
        while True:
            await self._gate.wait()
            self._refuse_if_closed()
            server = await self._fleet.pick(flight.request.group)
            if server is not None and server.up and self._gate.is_set():
                self._refuse_if_closed()
                return server

    async def _read(self, server: Server, flight: Flight, piece: Piece) -> Received:
        """What the server streams of a piece, until it ends or the flight is parked."""
        received = Received(server.dialect.url, piece, self._config)

        async def read() -> None:
            async with aclosing(server.dialect.generate(piece)) as chunks:
                async for chunk in chunks:
                    received.add(chunk)
                    self._tokens += len(chunk.tokens)
                    if received.stop is not None:
                        return
                    if chunk.stop is not None:
                        break
            raise ServerError(server.dialect.url, "failed", f"it ended piece {piece.id!r} unasked")

        await flight.reading(read())
        return received

    async def _scaled(self, server: Server, temperature: float) -> None:
        if temperature in (0, 1) or server.scaled:
            return
        async with server.turn:
            if not server.scaled:
                await prove_scaled(server.dialect, self._config.vocab)
                server.scaled = True

    async def _vouched(self, server: Server, received: Received, version: Version) -> None:
        """Make sure that it was `version` that sampled what was taken, however the server fared meanwhile."""
        if received.stamp is not None:
            check_stamp(server.dialect.url, received.stamp, version)
        elif received.tokens:
            await server.vouch(version)

    def _check(self, request: Request) -> None:
        self._refuse_if_closed()
        if self.version is None:
            raise EngineError(f"request {request.id!r}: the engine serves no version yet; swap one in first")
        if request.id in self._flying:
            raise EngineError(f"request {request.id!r} is already in flight; give each an id of its own")
        check_request(request, context_tokens=self._section.context_tokens, vocab=self._config.vocab)
        if request.want_routes and not self._section.routes:
            raise EngineError(f"request {request.id!r} wants routes, but engine.routes is false")

    def _settle(self) -> None:
        """Charge the seconds from here on to what is being done."""
        cause = "swap" if not self._gate.is_set() else "generate" if self._flying else "idle"
        if cause != self._account.cause:
            self._account.switch(cause)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
