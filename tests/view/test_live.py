"""What a person sees in a terminal, and what a log file gets."""

import io

from rich.console import Console

from contraflow.view.base import Snapshot, Worker
from contraflow.view.live import draw, open_view


def snapshot(**changes: object) -> Snapshot:
    fields: dict[str, object] = {
        "elapsed_s": 75.0,
        "left_s": 30.0,
        "step": 3,
        "steps": 10,
        "rewards": (0.2, 0.4, 0.6),
        "accuracies": (0.25, 0.5),
        "age_mean": 0.8,
        "age_max": 2,
        "age_bound": 2,
        "rollout_tokens_s": 12000.0,
        "train_tokens_s": 15000.0,
        "tickets_busy": 40,
        "tickets": 48,
        "groups": {"running": 20, "ready": 20},
        "workers": (Worker("rollout-0", "decode", {"decode": 3.0, "idle": 1.0}), Worker("trainer-0", "wait", {})),
    }
    return Snapshot(**{**fields, **changes})  # type: ignore[arg-type]


def rendered(page: object) -> str:
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    console.print(page)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_page_answers_what_a_person_asks() -> None:
    page = rendered(draw("contraflow", snapshot(note="rollout-0 died")))
    for fact in (
        "3 of 10 in 1m15s, about 30s left",
        "0.600",
        "0.500",
        "max 2 of 2 allowed",
        "12,000",
        "40 busy, 8 free",
    ):
        assert fact in page
    for fact in ("running 20", "decode 75%", "trainer-0", "rollout-0 died"):
        assert fact in page


def test_a_run_that_has_just_begun_can_be_drawn() -> None:
    page = rendered(draw("t", snapshot(step=0, rewards=(), accuracies=(), left_s=None, workers=())))
    assert "not yet" in page


def test_a_pipe_gets_one_line_for_new_steps_and_each_note_once() -> None:
    console = Console(file=io.StringIO(), width=60)
    with open_view("title", live=False, console=console) as view:
        view.show(snapshot(step=0, rewards=(), elapsed_s=5.0, note="rollout-0 died"))
        view.show(snapshot(note="rollout-0 died"))
        view.show(snapshot(note="rollout-0 died"))
        view.end("done")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[:3] == ["title", "starting the workers", "! rollout-0 died"]
    assert lines[3].startswith("step    3/10  reward  0.600  held-out 0.500  age 0.80 (max 2 of 2)")
    assert lines[4:] == ["done"]


def test_a_log_is_never_silent_for_long() -> None:
    console = Console(file=io.StringIO(), width=200)
    with open_view("title", live=False, console=console) as view:
        for second in range(25):
            view.show(snapshot(step=0, rewards=(), elapsed_s=float(second), groups={"dropped: no_signal": 99 * second}))
    lines = console.file.getvalue().splitlines()[2:]  # type: ignore[attr-defined]
    assert len(lines) == 2
    assert "no step for a while; groups: dropped: no_signal 990" in lines[0]


def test_a_terminal_gets_the_page_and_its_end() -> None:
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    with open_view("title", live=True, console=console) as view:
        view.show(snapshot())
        view.end("reward rose")
    assert "reward rose" in console.file.getvalue()  # type: ignore[attr-defined]
