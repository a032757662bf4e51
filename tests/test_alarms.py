"""Alarms in a run: what they read off a report, and a run that is made to collapse and is stopped."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contraflow.alarms import Alarms, Heard
from contraflow.config import check_section
from contraflow.config.alarms import Alarms as Section
from contraflow.model.builtin import model_folder
from contraflow.train.report import StepReport
from contraflow.types import Manifest, Probe, Version
from contraflow.view.report import write_report
from tests.cut_writer import space_in
from tests.test_loop import read_journal, recipe_of, run, steps_of

MANIFEST = Manifest(
    version=Version(0, 1),
    parent=None,
    model="",
    carrier="memory",
    location="",
    tensors=(),
    chunk_bytes=1,
    digests=(),
    probe=Probe((), (), 1e-3),
)
ZERO = {"failed": 0, "reward": 0.0, "parts": {}, "trained_tokens": 0, "loss": 0.0, "kl": 0.0, "balance": 0.0}
ZERO |= {"ratio_mean": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "grad_norm": 0.0, "learning_rate": 0.0}
HEALTHY = {"entropy": 1.0, "clipped_low": 0.0, "clipped_high": 0.0, "behaviour_kl": 0.0, "ratio_effective": 1.0}


def report(step: int, **fields: Any) -> StepReport:
    rest = {"updates": 1, "lengths": (4, 4), **HEALTHY, **ZERO, **fields}
    made = {"groups": 1, "episodes": 2, "age_mean": 0.0, "age_max": 0, "expert_loads": (), "seconds": {}}
    return StepReport(step=step, manifest=MANIFEST, applied=True, **made, **rest)


def heard(section: dict[str, Any], reports: list[dict[str, Any]]) -> list[Heard]:
    alarms = Alarms(check_section(Section, {"steps": 2, "action": "stop", **section}))
    return [one for step, fields in enumerate(reports) for one in alarms.hear(report(step, **fields))]


@pytest.mark.parametrize(
    ("name", "limit", "fields"),
    [
        ("entropy_min", 0.5, {"entropy": 0.1}),
        ("clip_max", 0.3, {"clipped_low": 0.2, "clipped_high": 0.2}),
        ("effective_min", 0.5, {"ratio_effective": 0.2}),
        ("kl_max", 0.1, {"behaviour_kl": 0.2}),
        ("repetition_max", 0.5, {"repetition": 0.9}),
    ],
)
def test_each_number_warns_then_stops_and_says_value_bound_and_what_to_do(name: str, limit: float, fields: Any) -> None:
    told = heard({name: limit}, [fields] * 4)
    assert [(one.name, one.sound) for one in told] == [(name, "warn"), (name, "stop")]
    for part in (f"alarms.{name} = {limit:g}", f"{told[0].value:.4g}", "for 2 steps in a row", "Lower "):
        assert part in told[0].text
    assert "resume" in told[1].text
    assert heard({name: limit}, [{}] * 6) == []
    assert heard({}, [fields] * 6) == []


def test_answers_that_grow_beyond_the_first_ones_sound_an_alarm() -> None:
    grown = heard({"length_growth_max": 2.0}, [{}, {}, *[{"lengths": (9, 9)}] * 4])
    assert [(one.value, one.sound) for one in grown] == [(2.25, "warn"), (2.25, "stop")]
    assert heard({"length_growth_max": 2.5}, [{}, {}, *[{"lengths": (9, 9)}] * 4]) == []


def test_a_step_that_moved_nothing_has_no_entropy_to_be_alarmed_at() -> None:
    nothing = {"updates": 0, "entropy": 0.0, "ratio_effective": 0.0, "lengths": ()}
    assert heard({"entropy_min": 0.5, "effective_min": 0.5, "repetition_max": 0.1}, [nothing] * 9) == []


def test_hearing_never_fails_whatever_a_report_says() -> None:
    drawn = random.Random(5)
    numbers = [float("inf"), -1.0, 0.0, 1e30, np.float32(0.5).item()]
    fields = [{key: drawn.choice(numbers) for key in HEALTHY} for _ in range(50)]
    everything = {"entropy_min": 0.5, "clip_max": 0.5, "effective_min": 0.5, "kl_max": 0.5}
    assert {one.sound for one in heard(everything, fields)} <= {"warn", "stop", "over"}


def test_a_run_that_collapses_is_warned_of_then_stopped_with_a_cut_it_can_go_on_from(tmp_path: Path) -> None:
    recipe = recipe_of(
        model_folder("builtin:tiny-moe"),
        run={"steps": 30, "eval_tasks": 0},
        engine={"kind": "native", "context_tokens": 32, "kv_tokens": 2048, "max_sequences": 32},
        train={"learning_rate": 0.05, "warmup_updates": 0, "checkpoint_every": 100},
        loss={"entropy_weight": 1e-6},
        alarms={"entropy_min": 0.02, "kl_max": 1.0, "steps": 2, "action": "stop"},
    )
    outcome = run(recipe, tmp_path)
    records = read_journal(tmp_path / "metrics.jsonl")
    alarms = [record for record in records if record["kind"] == "alarm"]
    assert outcome.stopped
    assert outcome.steps < 30
    assert [one["sound"] for one in alarms if one["name"] == alarms[-1]["name"]] == ["warn", "stop"]
    assert alarms[-1]["text"] in outcome.told(tmp_path)
    assert outcome.told(tmp_path).endswith(f"contraflow resume {tmp_path}")
    assert [step["step"] for step in steps_of(tmp_path)] == list(range(outcome.steps))
    assert space_in(tmp_path / "checkpoints").names()[0].endswith(f"step-{outcome.steps}")
    (tmp_path / "recipe.toml").touch()
    assert f"alarms.{alarms[-1]['name']}" in write_report(tmp_path).read_text(encoding="utf-8")
