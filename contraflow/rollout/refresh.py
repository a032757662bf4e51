"""Brings an engine to a new version of the weights, and proves it before a token of it is served.

Takes an engine and a carrier, gives a report per manifest. Loading and hashing happen off the engine's path; only the
copy and the probe stop it, inside `Engine.swap`. Does not decide when to refresh or which engine.
"""

import asyncio
from typing import Any, Literal, Protocol

import msgspec

from contraflow.errors import CarrierError, ConfigError, DeadlineExceeded, VersionGone
from contraflow.rollout.engine import Engine
from contraflow.telemetry import Clock
from contraflow.types import Manifest, Version
from contraflow.weights.carrier import Carrier
from contraflow.weights.fetch import Fetched, fetch
from contraflow.weights.manifest import Expected, total_bytes


class RefreshReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one manifest. `served`: the engine serves exactly this version now; if not, `reason` says why."""

    version: Version
    bytes: int = 0  # brought and verified
    moved: int = 0  # of what the carrier had to move for them: less, if the version travelled as a delta
    via: str = ""  # how they came, where the carrier has a choice
    fetch_s: float = 0.0  # loading and hashing, while the engine went on
    stall_s: float = 0.0  # in which the engine could run no step
    served: bool
    reason: str = ""
    gone: bool = False  # it was replaced before it could be read: a newer one is published, or about to be
    differs: str = ""  # in what the engine computes unlike the trainer, if in anything


class Fetcher(Protocol):
    """How a version comes here, by whatever carrier."""

    @property
    def kind(self) -> str:
        """The carrier, for people."""
        ...

    async def fetch(self, manifest: Manifest, expected: Expected | None) -> Fetched:
        """Bring a version and prove its bytes; with `expected`, first make sure that the engine can take it.

        Raises: CarrierError or BlobError if it did not arrive whole or does not fit, VersionGone if it is retired.
        """
        ...


class ChunkFetcher:
    """Loads whole versions, chunk by chunk, on a thread or on the calling one (`inline`: for runs that must repeat)."""

    def __init__(self, carrier: Carrier, fetching: Literal["thread", "inline"] = "thread") -> None:
        self.kind = carrier.kind
        self._carrier, self._fetching = carrier, fetching

    async def fetch(self, manifest: Manifest, expected: Expected | None) -> Fetched:
        """See `Fetcher`."""
        if self._fetching == "inline":
            return fetch(manifest, self._carrier, expected)
        return await asyncio.to_thread(fetch, manifest, self._carrier, expected)


class Refresher:
    """Refreshes one engine, one version at a time.

    Invariants: the version an engine serves only grows. Whatever it serves, and so may have to roll back to, is held
    readable here until a later version is proven. Of refreshes that race, the newest wins: one that finds a newer
    asked for before its swap steps aside and says so.
    """

    def __init__(
        self,
        engine: Engine,
        fetcher: Fetcher,
        *,
        clock: Clock,
        expected: Expected | None = None,
        deadline_s: float = 30.0,
        wire: str = "same",
    ) -> None:
        """`expected`: what the engine can take, checked before anything is loaded (the engine checks again itself).

        `deadline_s` bounds one refresh, waiting for its turn included. `wire` is the precision in which the engine's
        tokens travel to experts.
        """
        if deadline_s <= 0:
            raise ConfigError(f"deadline_s = {deadline_s}: a refresh needs more than 0 seconds")
        self._engine = engine
        self._fetcher = fetcher
        self._clock = clock
        self._expected = expected
        self._deadline_s = deadline_s
        self._wire = wire
        self._turn = asyncio.Lock()
        self._asked: list[Version] = []  # of the refreshes under way
        self._held: list[Fetched] = []
        self._doing = "its turn"  # of the refresh whose turn it is

    async def refresh(self, manifest: Manifest) -> RefreshReport:
        """Fetch, verify, swap. A repeated manifest is a no-op; a stale, overtaken or retired one is skipped, reported.

        Raises: CarrierError or BlobError if the version did not arrive whole, does not fit or failed its proof: the
        engine serves what it served before. DeadlineExceeded if it took too long; what is served then, `Engine.version`
        says.
        """
        version = manifest.version
        self._asked.append(version)
        try:
            async with asyncio.timeout(self._deadline_s):
                async with self._turn:
                    return self._skipped(version) or await self._bring(manifest)
        except TimeoutError:
            raise DeadlineExceeded(f"refresh to version {version}", self._doing, self._deadline_s) from None
        finally:
            self._asked.remove(version)

    def close(self) -> None:
        """Let go of the memory of every version. The engine must not be asked to swap after this."""
        self._let_go(list(self._held))

    async def _bring(self, manifest: Manifest) -> RefreshReport:
        version, began = manifest.version, self._clock()
        self._doing = f"the {self._fetcher.kind} carrier to give version {version}"
        try:
            fetched = await self._fetcher.fetch(manifest, self._expected)
        except VersionGone as gone:
            fetch_s = self._clock() - began
            return RefreshReport(version=version, fetch_s=fetch_s, served=False, reason=str(gone), gone=True)
        brought: dict[str, Any] = {
            "bytes": total_bytes(manifest.tensors),
            "moved": fetched.arrival.moved,
            "via": fetched.arrival.via,
            "fetch_s": self._clock() - began,
        }
        overtaken = self._skipped(version)
        if overtaken is not None:
            fetched.close()
            return msgspec.structs.replace(overtaken, **brought)
        stall_s = await self._swap(fetched)
        return RefreshReport(version=version, **brought, stall_s=stall_s, served=True, differs=self._differs(manifest))

    def _differs(self, manifest: Manifest) -> str:
        differs = []
        if manifest.wire != self._wire:
            differs.append(
                f"tokens travel to experts as {self._wire!r} in the engine, as {manifest.wire!r} in the trainer"
            )
        if any(entry.dtype.startswith("float8") for entry in manifest.tensors):
            differs.append("experts' weights are rounded to float8 in the engine, and not in the trainer")
        return "; ".join(differs)

    async def _swap(self, fetched: Fetched) -> float:
        manifest = fetched.manifest
        self._doing = f"the engine to swap to version {manifest.version}"
        self._held.append(fetched)  # before the swap: one that is cancelled may still end with it
        try:
            stall_s = await self._engine.swap(manifest.version, fetched.tensors, manifest.probe)
        except CarrierError as fault:
            self._let_go([fetched])
            raise CarrierError(
                f"version {manifest.version} is refused and {self._engine.version} still served: {fault}"
            ) from fault
        self._let_go(self._held[:-1])
        return stall_s

    def _let_go(self, versions: list[Fetched]) -> None:
        for fetched in versions:
            self._held.remove(fetched)
            fetched.close()  # not left to the last reference: tracebacks and futures hold some for long

    def _skipped(self, version: Version) -> RefreshReport | None:
        """Why `version` need not be brought, if it need not."""
        served, newest = self._engine.version, max(self._asked)
        if served == version:
            return RefreshReport(version=version, served=True, reason="repeated: it is served already")
        if served is not None and version < served:
            return RefreshReport(version=version, served=False, reason=f"stale: version {served} is served")
        if version < newest:
            return RefreshReport(version=version, served=False, reason=f"overtaken: version {newest} was asked for")
        return None
