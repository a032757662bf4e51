"""The servers of one engine: which one takes a request, what weights they hold, and what becomes of one that fails.

Takes dialects and ways to start servers, gives servers that are up. One that fails is started anew, or waited for, and
brought to the current weights and proven before it takes another request. Does not know requests or completions.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from contraflow.config import Engine as EngineSection
from contraflow.errors import CarrierError, ConfigError, EngineError, ServerError
from contraflow.rollout.dialect import Dialect
from contraflow.types import Probe, Version
from contraflow.weights.probe import check_probe

MAX_MENDS = 3  # of one server without a finished request in between
_SLACK = 8  # requests by which the server of a prefix may be busier than the idlest


class Process(Protocol):
    """A server's process, where the engine starts it."""

    async def start(self, answers: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start it, or start it anew; return when `answers` returns. Raises ServerError when it ends or is late."""
        ...

    async def stop(self) -> None:
        """End it. Safe to call twice."""
        ...


@dataclass(frozen=True)
class Release:
    """Weights that servers are to hold. `probe` None: trusted, since they are those of the model's own folder."""

    version: Version
    folder: Path
    probe: Probe | None


@dataclass(eq=False)
class Server:
    """One server. Invariant: `up` only while it answers and was proven to hold the fleet's current release."""

    dialect: Dialect
    process: Process
    up: bool = False
    taken: int = 0  # requests it works on
    mends: int = 0  # since it last finished a request
    scaled: bool = False  # its log-probabilities were seen to follow the temperature
    mending: asyncio.Task[None] | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of questions that one task puts for many
    _asked: asyncio.Task[str] | None = None

    async def vouch(self, version: Version) -> None:
        """Make sure that the server holds `version` now. Raises ServerError if it does not, or cannot say."""
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask())
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have gone
        check_stamp(self.dialect.url, await asyncio.shield(self._asked), version)

    async def _ask(self) -> str:
        """One question for all who came before it was put: it must not be older than what they vouch for."""
        async with self.turn:
            self._asked = None
            return await self.dialect.stamp()


def check_stamp(url: str, stamp: str, version: Version) -> None:
    """Raise ServerError unless a server's stamp is the version's."""
    if stamp != str(version):
        held = f"weights of {stamp!r}" if stamp else "the weights it began with"
        raise ServerError(url, "stale", f"it holds {held}, version {version} is served; it was started anew or changed")


def choose(group: str, taken: Sequence[int], names: Sequence[str]) -> int:
    """Index of the server for a request: the group's own, which has its prefix cached, or the idlest if that is busy.

    The group's own is the highest hash (rendezvous hashing), so that a server's end moves no other server's groups.
    """
    weights = [hashlib.blake2b(f"{name}\0{group}".encode(), digest_size=8).digest() for name in names]
    home = max(range(len(names)), key=weights.__getitem__)
    idlest = min(range(len(taken)), key=taken.__getitem__)
    return home if group and taken[home] <= taken[idlest] + _SLACK else idlest


class Fleet:
    """Invariant: every server is up, or being mended, or lost for good; `current` is what those that are up hold."""

    def __init__(
        self,
        servers: Sequence[Server],
        section: EngineSection,
        *,
        current: Release | None,
        on_broken: Callable[[str], None],
    ) -> None:
        """`on_broken` is told once, and why, when the last server is lost."""
        self._servers, self._section, self._on_broken = servers, section, on_broken
        self.current = current
        self.faults: Counter[str] = Counter()  # failures of servers by kind, and those "lost" for good
        self._lost: dict[Server, EngineError] = {}
        self._begun = self._closed = False

    async def ready(self) -> None:
        """Start what is not started; return when no server is being mended. Raises EngineError if none is left."""
        if not self._begun:
            self._begun = True
            for server in self._servers:
                server.mending = asyncio.create_task(self._begin(server))
        while mending := [server.mending for server in self._servers if server.mending]:
            await asyncio.wait(mending)
        self._refuse_if_lost()

    async def pick(self, group: str) -> Server | None:
        """A server that is up; waits while all are being mended. None: all are being brought to another release.

        Raises EngineError if none is left.
        """
        if not self._begun:
            await self.ready()
        while True:
            self._refuse_if_lost()
            up = [server for server in self._servers if server.up]
            if up:
                return up[choose(group, [server.taken for server in up], [server.dialect.url for server in up])]
            mending = [server.mending for server in self._servers if server.mending]
            if not mending:
                return None
            await asyncio.wait(mending, return_when=asyncio.FIRST_COMPLETED)

    def suspect(self, server: Server, fault: ServerError) -> None:
        """A server failed: count it, take it out, and mend it. What others saw of the same failure is not counted."""
        if server.up:
            self.faults[fault.kind] += 1
            server.up = False
            server.mending = asyncio.create_task(self._mend(server, fault))

    async def serve(self, release: Release) -> None:
        """Bring every server to a release, proven; nobody else may ask anything of them meanwhile.

        Raises: CarrierError if it cannot be proven, or EngineError if no server is left; those that remain then hold
        what they held.
        """
        await self.ready()
        servers = [server for server in self._servers if server not in self._lost]
        previous, self.current = self.current, release
        found = await asyncio.gather(*(self._try(server) for server in servers))
        fault = next((fault for fault in found if fault), None)
        if fault is not None:
            self.current = previous
            await asyncio.gather(*(self._back(server) for server in servers))
            raise fault
        self._refuse_if_lost()

    async def close(self) -> None:
        """Stop what was started."""
        self._closed = True
        mending = [server.mending for server in self._servers if server.mending]
        for task in mending:
            task.cancel()
        await asyncio.gather(*mending, return_exceptions=True)
        await asyncio.gather(*(server.process.stop() for server in self._servers))

    async def _try(self, server: Server) -> CarrierError | None:
        """Bring one server to the current release, mending it if it fails on the way; why it is no good, if it is."""
        try:
            await self._bring(server)
        except CarrierError as fault:
            return fault
        except ServerError as fault:
            self.faults[fault.kind] += 1
            server.up = False
            try:
                await self._restore(server)
            except CarrierError as refusal:
                return refusal
            except (ServerError, ConfigError) as end:
                self._lose(server, end)
        return None

    async def _back(self, server: Server) -> None:
        """Bring one server back to what it held; one that cannot be is mended."""
        if server in self._lost:
            return
        try:
            await self._bring(server)
            server.up = True
        except (ServerError, CarrierError) as fault:
            server.up = True
            self.suspect(server, ServerError(server.dialect.url, "stale", f"it cannot be brought back: {fault}"))
            if server.mending is not None:
                await asyncio.wait([server.mending])

    async def _bring(self, server: Server) -> None:
        release, dialect = self.current, server.dialect
        if release is None:
            return
        await dialect.pause()
        await dialect.load(release.folder, str(release.version))
        await dialect.resume()
        if release.probe is not None:
            # A salt of its own: what is computed for a proof serves no request.
            check_probe(release.probe, await dialect.score(release.probe.prompts, f"probe {release.version}"))

    async def _begin(self, server: Server) -> None:
        try:
            await self._anew(server)
        except Exception as fault:  # noqa: BLE001 - of a task: whatever it is, requests must not wait for this server
            self._lose(server, fault)
        finally:
            server.mending = None

    async def _mend(self, server: Server, cause: ServerError) -> None:
        server.mends += 1
        try:
            if server.mends > MAX_MENDS:
                raise cause
            await self._restore(server)
        except Exception as fault:  # noqa: BLE001 - of a task: whatever it is, requests must not wait for this server
            self._lose(server, fault)
        finally:
            server.mending = None

    async def _restore(self, server: Server) -> None:
        """Bring a server that failed to the current release: as it is if it can be, or else started anew."""
        try:
            await server.dialect.alive()
            await self._settle_in(server)
        except ServerError:
            await self._anew(server)

    async def _anew(self, server: Server) -> None:
        """Start a server, or wait for it, and bring it to the current release."""
        await server.process.start(server.dialect.alive)
        await self._settle_in(server)

    async def _settle_in(self, server: Server) -> None:
        server.scaled = False
        await server.dialect.check(self._section)
        await self._bring(server)
        server.up = True

    def _lose(self, server: Server, fault: Exception) -> None:
        self.faults["lost"] += 1
        error = EngineError(f"server {server.dialect.url} is given up: {fault}")
        error.__cause__ = fault
        self._lost[server] = error
        if len(self._lost) == len(self._servers):
            self._on_broken(str(error))

    def _refuse_if_lost(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if len(self._lost) == len(self._servers):
            raise next(iter(self._lost.values()))
