"""Life of a worker process of the runtimes `local` and `ray`, from its first line to its exit.

Makes the worker, answers its calls, shows signs of life, and leaves when the runtime says so or its keeper is gone.
Ctrl-C reaches the whole process group and is ignored here: the runtime stops workers in order. SIGTERM is a notice to
leave, passed on to whoever runs the system; SIGUSR1 writes the stacks of all threads.
"""

import asyncio
import concurrent.futures
import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import msgspec
import zmq

from contraflow.errors import WorkerDied
from contraflow.runtime.base import Address, Ref
from contraflow.runtime.channel import FLUSH_MS, Caller, Context, Server, Socket, bind
from contraflow.runtime.faults import Fault, to_fault
from contraflow.runtime.names import factory_name
from contraflow.runtime.seal import Key
from contraflow.runtime.service import Service
from contraflow.runtime.status import GAVE_UP, LEFT, StatusPage, read_status
from contraflow.telemetry import Clock

BEAT_S = 0.5
ORPHAN_S = 2.0  # how long a worker may take to close once its keeper is gone


class Grave(msgspec.Struct, frozen=True):
    """A worker that died, for those who might call it."""

    endpoint: str
    worker: str  # the one to blame: a gang dies of one rank
    detail: str

    def death(self) -> WorkerDied:
        return WorkerDied(self.worker, self.detail)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is born with. `plan` is `(factory, kwargs)` as multiprocessing pickles them.

    `threads` are torch's; 0 for a process that does not compute. `files`: a path that its status page, `.status`, and
    the stacks of its threads, `.stack`, are beside. `key`: that of the run's callers, where channels are sealed.
    """

    address: Address
    files: str
    threads: int
    clock: Clock
    environment: Mapping[str, str]
    graves: tuple[Grave, ...]
    plan: bytes
    key: Key | None = None


class ProcessHost:
    """What the worker may use of its process."""

    def __init__(self, name: str, clock: Clock, caller: Caller, page: StatusPage) -> None:
        self._name, self._clock, self._caller, self._page = name, clock, caller, page

    @property
    def name(self) -> str:
        return self._name

    @property
    def clock(self) -> Clock:
        return self._clock

    def connect(self, address: Address) -> Ref[Any]:
        return self._caller.connect(address)

    def give_up(self, reason: str) -> None:
        """See `Host.give_up`."""
        self._page.running(f"{GAVE_UP}{reason}")
        os._exit(1)


class Control:
    """The process that houses a worker, as the runtime calls it. Invariant: once `leaving` is set, the process ends."""

    def __init__(self, caller: Caller, server: Server) -> None:
        self._caller, self._server = caller, server
        self.service: Service | None = None
        self.fault: Fault | None = None
        self.leaving = asyncio.Event()

    async def ready(self) -> Fault | None:
        """Answers once the factory ended: None, or what it raised; after a fault the process ends."""
        if self.fault:
            self.leaving.set()
        return self.fault

    async def bury(self, grave: Grave) -> None:
        """Another worker died."""
        self._caller.bury(grave.endpoint, grave.death())
        self._server.forget(grave.endpoint)

    async def stop(self) -> None:
        """Run the worker's `close()` once, then end the process. Raises what `close()` raised."""
        service, self.service = self.service, None
        try:
            if service:
                await service.close()
        finally:
            self.leaving.set()  # seen by the loop only after this answer went out: sending does not suspend


def main(setup: Setup) -> None:
    """The whole life of a worker process of the `local` runtime."""
    parent = parent_process()
    assert parent is not None, "a worker process has a parent"
    multiprocessing.current_process().daemon = False  # it may have children of its own; it ends with its runtime anyway
    os.environ.update(setup.environment)  # the fork server was born earlier, with the environment and threads of then
    context = zmq.Context()
    live(setup, context, bind(context, setup.address.endpoint), keeper=parent.sentinel)
    context.destroy(linger=FLUSH_MS)


def live(setup: Setup, context: Context, socket: Socket, *, keeper: int) -> None:
    """Be a worker, behind a bound socket, until told to stop; called in the main thread of its process.

    `keeper` is a file descriptor that becomes readable when whoever keeps this process is gone: then so is it, soon.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if setup.threads:
        import torch

        torch.set_num_threads(setup.threads)
        # Softmaxes of sure models are full of denormals, which a CPU takes a hundred times longer over. Threads inherit
        # what is set here.
        torch.set_flush_denormal(True)
    _take_name(setup.address.worker)
    asyncio.run(_live(setup, context, socket, keeper))


def _take_name(name: str) -> None:
    """Let `ps` and `top` say which worker this is, where the system has a place for it (15 bytes on Linux)."""
    place = Path("/proc/self/comm")
    if place.exists():
        place.write_text(name[:15], encoding="utf-8")


def status_path(files: str) -> Path:
    """Where a worker writes its status page."""
    return Path(f"{files}.status")


def stack_path(files: str) -> Path:
    """Where it writes the stacks of its threads when it gets SIGUSR1."""
    return Path(f"{files}.stack")


def trouble(address: Address, clock: Clock) -> str:
    """Why the worker at an address may be slow to answer; empty when it looks healthy, or is not a neighbour."""
    scheme, _, files = address.endpoint.partition("ipc://")
    status = None if scheme else read_status(status_path(files))
    return status.trouble(clock()) if status else ""


async def _live(setup: Setup, context: Context, socket: Socket, keeper: int) -> None:
    name, clock = setup.address.worker, setup.clock
    page = StatusPage(status_path(setup.files), clock())
    page.running("its factory")
    stacks = stack_path(setup.files).open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    identity = setup.address.endpoint
    caller = Caller(context, owner=name, identity=identity, trouble=lambda a: trouble(a, clock), key=setup.key)
    for grave in setup.graves:
        caller.bury(grave.endpoint, grave.death())
    server = Server(socket)
    control = Control(caller, server)
    with _Heart(page, clock, asyncio.get_running_loop(), control, keeper):
        control.service = _make(setup, ProcessHost(name, clock, caller, page), control, page.running)
        page.running("")
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, page.leaving)
        serving = asyncio.create_task(server.serve(worker=control.service, control=Service(name, control)))
        leaving = asyncio.create_task(control.leaving.wait())
        await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        serving.cancel()
        await asyncio.wait({serving})
        caller.close()
    page.running(LEFT)


def _make(setup: Setup, host: ProcessHost, control: Control, changed: Callable[[str], None]) -> Service | None:
    method = "its factory"
    try:
        factory, kwargs = pickle.loads(setup.plan)
        method = factory_name(factory)
        return Service(host.name, factory(host, **kwargs), changed)
    except Exception as error:  # noqa: BLE001 - whoever starts the worker gets it
        control.fault = to_fault(error, worker=host.name, method=method)
        return None


class _Heart:
    """A thread that shows signs of life, and ends the process soon after its keeper ended."""

    def __init__(
        self, page: StatusPage, clock: Clock, loop: asyncio.AbstractEventLoop, control: Control, keeper: int
    ) -> None:
        self._page, self._clock, self._loop, self._control, self._keeper = page, clock, loop, control, keeper
        self._end, self._stop = connection.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.close()
        self._thread.join(timeout=ORPHAN_S)

    def _beat(self) -> None:
        ready: list[Any] = []
        while not ready:
            self._page.beat(self._clock())
            self._loop.call_soon_threadsafe(self._tick)
            ready = connection.wait([self._keeper, self._end], timeout=BEAT_S)
        if self._keeper in ready:
            closing = asyncio.run_coroutine_threadsafe(self._control.stop(), self._loop)
            concurrent.futures.wait([closing], timeout=ORPHAN_S)
            os._exit(1)

    def _tick(self) -> None:
        self._page.tick(self._clock())
