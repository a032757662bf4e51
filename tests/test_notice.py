"""A run on a machine that is to go: it ends as at SIGTERM, with a cut, and what was under way goes on at the resume."""

import time
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.buffer.audit import audit
from contraflow.errors import ConfigError
from contraflow.run import run_recipe
from contraflow.telemetry import read_journal
from contraflow.view.base import Snapshot
from tests.imds import ACTION, SOON, Imds, imds
from tests.test_loop import recipe_of

NATIVE = {"kind": "native", "context_tokens": 32, "kv_tokens": 2048, "max_sequences": 32}


class After:
    """A view that has the service announce the machine's end once a step is done."""

    def __init__(self, service: Imds) -> None:
        self._service = service

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.step >= 1:
            self._service.say(ACTION, SOON)

    def end(self, outcome: str) -> None:
        """Nothing to draw."""


def test_a_run_told_that_its_machine_goes_ends_with_a_cut_and_resumes(tiny_moe: Path, tmp_path: Path) -> None:
    with imds() as service:
        recipe = recipe_of(
            tiny_moe,
            engine=NATIVE,
            rollout={"continue_from": 1},
            run={"steps": 1000, "eval_tasks": 0},
            train={"checkpoint_every": 1000},
            runtime={"notice_url": service.url, "notice_every_s": 0.2},
        )
        outcome = run_recipe(recipe, tmp_path, resume=False, clock=time.monotonic, view=After(service))
        assert outcome.stopped
        totals = accounts(tmp_path)
        assert totals.cut == outcome.steps < 1000
        assert totals.reposed["handed_back"] > 0
        notices = [record for record in read_journal(tmp_path / "metrics.jsonl") if record["kind"] == "notice"]
        assert [(record["worker"], "terminate" in record["detail"]) for record in notices] == [("machine", True)]
        service.answers.clear()
        run = recipe.run.model_copy(update={"steps": outcome.steps + 4})
        recipe = recipe.model_copy(update={"run": run})
        resumed = run_recipe(recipe, tmp_path, resume=True, clock=time.monotonic, view=After(Imds()))
    assert (resumed.steps, resumed.stopped) == (outcome.steps + 4, False)
    assert sum(record["tokens"] for record in read_journal(tmp_path / "metrics.jsonl") if record["kind"] == "continued")
    assert audit(tmp_path) == []


def test_a_service_that_does_not_answer_is_refused_before_anything_starts(tiny_moe: Path, tmp_path: Path) -> None:
    with imds() as service:
        url = service.url
    recipe = recipe_of(tiny_moe, runtime={"notice_url": url})
    with pytest.raises(ConfigError, match=r"runtime\.notice_url: the metadata service at http://127\.0\.0\.1"):
        run_recipe(recipe, tmp_path / "run", resume=False, clock=time.monotonic, view=After(Imds()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "169.254.169.254", "http://", "http://host/path"])
def test_an_address_that_is_none_is_refused(tiny_moe: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.notice_url"):
        recipe_of(tiny_moe, runtime={"notice_url": url})
