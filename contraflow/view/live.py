"""The terminal: a live page when it is a terminal, plain lines (at most one a second) when it is not.

Takes snapshots, draws them with rich. Does not gather anything, and does not touch the run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from contraflow.view.base import Snapshot, View, Worker

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48  # characters of a curve
QUIET_S = 10.0  # a log says at least this often what the run is waiting on


@contextmanager
def open_view(title: str, *, live: bool, console: Console | None = None) -> Iterator[View]:
    """A view for this terminal; on the way out the terminal is as it was."""
    console = console or Console(highlight=False)
    if not live:
        yield PlainView(title, console)
        return
    with Live(console=console, auto_refresh=False, transient=False) as page:
        yield LiveView(title, page)


class PlainView:
    """A line when steps were done: readable in a log file, a pipe or CI."""

    def __init__(self, title: str, console: Console) -> None:
        self._console = console
        self._noted, self._step, self._at = "", -1, 0.0
        self._print(title)
        self._print("starting the workers")

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.note and snapshot.note != self._noted:
            self._noted = snapshot.note
            self._print(f"! {snapshot.note}")
        if snapshot.step != self._step and snapshot.rewards:
            self._step, self._at = snapshot.step, snapshot.elapsed_s
            self._line(snapshot)
        elif snapshot.elapsed_s - self._at >= QUIET_S:
            self._at = snapshot.elapsed_s
            states = ", ".join(f"{state} {count}" for state, count in snapshot.groups.items())
            self._print(f"step {snapshot.step:4d}/{snapshot.steps}  no step for a while; groups: {states}")

    def end(self, outcome: str) -> None:
        self._print(outcome)

    def _line(self, snapshot: Snapshot) -> None:
        accuracy = f"{snapshot.accuracies[-1]:.3f}" if snapshot.accuracies else "-"
        self._print(
            f"step {snapshot.step:4d}/{snapshot.steps}  reward {snapshot.rewards[-1]:6.3f}  held-out {accuracy}  "
            f"age {snapshot.age_mean:.2f} (max {snapshot.age_max} of {snapshot.age_bound})  "
            f"rollout {snapshot.rollout_tokens_s:,.0f} tok/s  train {snapshot.train_tokens_s:,.0f} tok/s  "
            f"tickets {snapshot.tickets_busy}/{snapshot.tickets}  {_clock(snapshot.elapsed_s)}"
        )

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


class LiveView:
    """A page that redraws itself once a second."""

    def __init__(self, title: str, page: Live) -> None:
        self._title = title
        self._page = page
        self._end = ""
        self._last: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        self._page.update(draw(self._title, snapshot), refresh=True)

    def end(self, outcome: str) -> None:
        body = [draw(self._title, self._last)] if self._last else []
        self._page.update(Group(*body, Text(outcome)), refresh=True)


def draw(title: str, s: Snapshot) -> RenderableType:
    """One snapshot as a page of about twenty lines."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    left = "" if s.left_s is None else f", about {_clock(s.left_s)} left"
    grid.add_row("step", ProgressBar(total=s.steps, completed=s.step, width=WIDTH))
    grid.add_row("", f"{s.step} of {s.steps} in {_clock(s.elapsed_s)}{left}")
    grid.add_row("reward", _curve(s.rewards, "green"))
    grid.add_row("held-out accuracy", _curve(s.accuracies, "cyan"))
    grid.add_row("age of trained tokens", f"mean {s.age_mean:.2f}, max {s.age_max} of {s.age_bound} allowed")
    grid.add_row("tokens/s", f"rollout {s.rollout_tokens_s:,.0f}   train {s.train_tokens_s:,.0f}")
    grid.add_row("tickets", f"{s.tickets_busy} busy, {s.tickets - s.tickets_busy} free")
    grid.add_row("groups", "  ".join(f"{state} {count}" for state, count in s.groups.items()))
    if s.note:
        grid.add_row("note", Text(s.note, style="yellow"))
    return Panel(Group(grid, Text(), _workers(s.workers)), title=title, border_style="dim")


def _workers(workers: Sequence[Worker]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2))
    for column in ("process", "now", "where its time went"):
        table.add_column(column)
    for worker in workers:
        total = sum(worker.seconds.values()) or 1.0
        shares = sorted(worker.seconds.items(), key=lambda item: -item[1])[:5]
        table.add_row(worker.name, worker.doing, "  ".join(f"{cause} {100 * s / total:.0f}%" for cause, s in shares))
    return table


def _curve(values: Sequence[float], style: str) -> Text:
    if not values:
        return Text("not yet", style="dim")
    shown = values[-WIDTH:]
    low, high = min(*shown, 0.0), max(*shown, 1.0)
    bars = "".join(BARS[round((v - low) / (high - low) * (len(BARS) - 1))] for v in shown)
    return Text.assemble((bars, style), f" {values[-1]:.3f}", (f"  from {values[0]:.3f}", "dim"))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def run_title(recipe: str, folder: Path) -> str:
    """What a run is headed with."""
    return f"contraflow · {recipe} · {folder}"
