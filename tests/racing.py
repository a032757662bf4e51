"""Three processes that want the same things at the same moment, for tests of what only one may win.

They open what they need first, and begin together. Shared by the suites of blobs and of cuts.
"""

import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from tests.cut_writer import keys
from tests.processes import forking

Try = Callable[[str], bool]  # to win the thing of that name; whether it did
Enter = Callable[[str, str], Try]  # (url, racer); importable by name


def race(enter: Enter, url: str, names: Sequence[str], *, wait_s: float) -> dict[str, list[str]]:
    """What each racer won. Every name was won by exactly one, or this fails."""
    context = forking()
    racers = []
    for racer in ("x", "y", "z"):
        go_here, go_there = context.Pipe()
        answer_here, answer_there = context.Pipe()
        process = context.Process(target=_run, args=(keys(), enter, url, racer, names, go_there, answer_there))
        process.start()
        racers.append((racer, process, go_here, answer_here))
    for _, _, _, answer in racers:
        assert answer.poll(wait_s)
        assert answer.recv() == "ready"
    for _, _, go, _ in racers:
        go.send("go")
    won = {racer: answer.recv() for racer, _, _, answer in racers if answer.poll(wait_s)}
    for _, process, _, _ in racers:
        process.join(30)
    assert sorted(name for mine in won.values() for name in mine) == sorted(names)
    return won


def _run(
    aws: dict[str, str], enter: Enter, url: str, racer: str, names: Sequence[str], go: Connection, answer: Connection
) -> None:
    os.environ.update(aws)
    attempt = enter(url, racer)
    answer.send("ready")
    go.recv()
    answer.send([name for name in names if attempt(name)])
