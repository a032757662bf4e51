"""The laboratory in a whole run, behind the real engine: what it finds there, and that it disturbs nothing."""

from pathlib import Path
from typing import Any

import pytest

from contraflow.algo.mismatch import CAUSES
from contraflow.config import check_recipe
from contraflow.errors import ConfigError, RunFolderError
from contraflow.model.builtin import model_folder
from contraflow.view.inspect import mismatch
from contraflow.view.mismatch import mismatch_chart, mismatch_lines
from contraflow.view.report import write_report
from tests.test_loop import parts_of, recipe_of, run, steps_of

ENGINE = {"kind": "native", "context_tokens": 48, "kv_tokens": 4096, "max_sequences": 32, "routes": True}


def looked(folder: Path, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {
        "run": {"steps": 6, "eval_tasks": 0, "mismatch_every": 1, "mismatch_tokens": 200},
        "engine": ENGINE,
        "train": {"warmup_updates": 0, "learning_rate": 1e-3},
        "loss": {"entropy_weight": 0.01},  # weights move whatever answers earn
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    run(recipe_of(model_folder("builtin:tiny-moe"), **tree), folder)
    (folder / "recipe.toml").touch()
    return [step["mismatch"] for step in steps_of(folder) if step.get("mismatch")]


def most(looks: list[dict[str, Any]]) -> dict[str, float]:
    return {cause: max(look["parts"][cause]["size"] for look in looks) for cause in CAUSES}


def test_behind_an_engine_in_full_precision_staleness_is_all_there_is_and_people_are_told(tmp_path: Path) -> None:
    looks = looked(tmp_path, engine={"on_refresh": "recompute"}, run={"steps": 3})
    found = most(looks)
    assert len(looks) == 3
    assert found["staleness"] > 1e-2
    assert found["cache"] == 0.0
    assert found["numerics"] < 1e-4
    assert all(sum(look["routes_differ"]) < 0.01 and look["routed"] > 0 for look in looks)
    told, page = mismatch(tmp_path), write_report(tmp_path).read_text(encoding="utf-8")
    assert all(word in told for word in (*CAUSES, "all", "effective"))
    assert "Mismatch by cause" in page


def test_a_run_that_never_looked_says_how_to(tmp_path: Path) -> None:
    run(recipe_of(model_folder("builtin:tiny-moe"), run={"steps": 1, "eval_tasks": 0}), tmp_path)
    (tmp_path / "recipe.toml").touch()
    assert "run.mismatch_every" in mismatch(tmp_path)
    assert "Mismatch" not in write_report(tmp_path).read_text(encoding="utf-8")
    with pytest.raises(RunFolderError, match="not the folder of a run"):
        mismatch(tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_cache_that_the_engine_kept_through_refreshes_is_told_from_its_numerics(tmp_path: Path) -> None:
    looks = looked(tmp_path, buffer={"max_age": 4}, rollout={"max_new_tokens": 32}, run={"steps": 8})
    found = most(looks)
    assert sum(look["refreshed"] for look in looks) > 0
    assert found["cache"] > 1e-4
    assert found["numerics"] < 1e-4


@pytest.mark.slow
def test_behind_an_engine_that_rounds_a_synchronous_run_has_numerics_alone(tmp_path: Path) -> None:
    found = most(
        looked(
            tmp_path,
            run={"steps": 2},
            engine={"compute": "bfloat16"},
            buffer={"max_age": 0},
            weights={"probe_tolerance": 0.1},
        )
    )
    assert found["numerics"] > 1e-3
    assert max(found["cache"], found["staleness"]) < 1e-5


@pytest.mark.slow
def test_a_look_moves_no_bit_of_a_run(tmp_path: Path) -> None:
    for name, every in (("with", 2), ("without", 0)):
        looked(tmp_path / name, run={"mismatch_every": every, "steps": 3})
    assert parts_of(tmp_path / "with") == parts_of(tmp_path / "without")


def test_pipeline_stages_are_refused_by_name_and_other_ranks_are_not() -> None:
    tree = {"run": {"mismatch_every": 1}, "model": {"folder": "builtin:tiny-moe"}}
    with pytest.raises(ConfigError, match=r"mismatch_every = 1 with train.parallel.pp = 2"):
        check_recipe({**tree, "train": {"parallel": {"pp": 2}}})
    for parallel in ({"dp": 2, "ep": 2}, {"cp": 2}, {"tp": 2}):
        check_recipe({**tree, "train": {"parallel": parallel}})


def test_a_look_that_saw_no_token_is_told_apart_from_one_that_found_no_mismatch() -> None:
    part = {"size": 0.0, "largest": 0.0, "k1": 0.0, "k3": 0.0, "effective": 1.0}
    seen = {"tokens": 8, "refreshed": 0, "unknown": 0, "entropy": 0.5, "routed": 0, "routes_differ": []}
    step = {"step": 1, "corrected": {}, "clipped_low": 0.0, "clipped_high": 0.0}
    looked_at = {**step, "mismatch": {**seen, "parts": {name: {**part, "size": 0.25} for name in (*CAUSES, "all")}}}
    blind = {**step, "mismatch": {**seen, "tokens": 0, "unknown": 9, "parts": dict.fromkeys((*CAUSES, "all"), part)}}

    told = "\n".join(mismatch_lines([looked_at, blind]))
    assert "over 1 looks: numerics 2.50e-01" in told
    assert "such as the first after a resume: 1" in told
    assert "after a resume: 1" in "\n".join(mismatch_lines([blind]))
    assert mismatch_chart([blind]) is None
