"""The report is one page that stands alone, holds what the run wrote, and cannot be broken by what a model wrote."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import RunFolderError
from contraflow.view.charts import curves, heat, shares
from contraflow.view.report import page, thin, write_report


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "step", "at": 10.0 + step, "step": step, "applied": True, "fault": "", "groups": 4, "episodes": 32,
        "failed": 0, "reward": 0.2 + 0.05 * step, "parts": {"correct": 0.2 + 0.05 * step}, "entropy": 0.5,
        "behaviour_kl": 0.001, "clipped_low": 0.01, "clipped_high": 0.02, "grad_norm": 0.3, "age_mean": 1.1,
        "age_max": 2, "expert_loads": [[10, 30], [20, 20]], "seconds": {"forward": 0.2}, "trained_tokens": 300,
    }  # fmt: skip
    return {**record, **changes}


def pools_record(at: float, tokens: int) -> dict[str, Any]:
    workers = [
        {"name": "rollout-0", "doing": "decode", "seconds": {"decode": 7.5, "idle": 2.5}},
        {"name": "trainer-0", "doing": "wait", "seconds": {"forward": 5.0, "wait": 5.0}},
    ]
    groups = {"running": 3, "trained": 40, "dropped: no_signal": 7}
    return {
        "kind": "pools", "at": at, "elapsed_s": at, "workers": workers, "groups": groups,
        "rollout_tokens": tokens, "train_tokens": tokens // 2,
        "placed": {"rollout-0": {"times": 3, "in_order": 1.9, "before": 1.2, "after": 1.04}},
    }  # fmt: skip


EPISODE = {
    "pieces": ["1", "+", "2", "=", "3"], "roles": ["prompt"] * 4 + ["model"], "logprobs": [0, 0, 0, 0, -0.1],
    "advantages": [0, 0, 0, 0, 1.0], "versions": [-1, -1, -1, -1, 3], "reward": 1.0, "parts": {"correct": 1.0},
    "stop": "stop",
}  # fmt: skip


def run_records() -> list[dict[str, Any]]:
    version = {"line": 1, "n": 5}
    return [
        *(step_record(step) for step in range(12)),
        {"kind": "eval", "at": 11.0, "version": version, "accuracy": 0.31, "count": 64},
        {"kind": "refresh", "at": 11.0, "version": version, "stall_s": 0.004, "served": True, "reason": ""},
        {"kind": "refresh", "at": 12.0, "version": version, "stall_s": 0.0, "served": False, "reason": "digest"},
        {"kind": "death", "at": 13.0, "worker": "rollout-0", "detail": "SIGKILL"},
        *(pools_record(float(t), 1000 * t) for t in range(10)),
    ]


def episode_record(step: int, **changes: Any) -> dict[str, Any]:
    record = {"step": step, "group": step, "attempt": 1, "prompt": "1+2=", "reference": "3", "episodes": [EPISODE]}
    return {**record, **changes}


class Strict(HTMLParser):
    """Counts elements, and what scripts and links point outside."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [value or "" for name, value in attrs if name in {"src", "href"}]


def parsed(text: str) -> Strict:
    parser = Strict()
    parser.feed(text)
    return parser


def test_a_step_that_had_nothing_to_teach_has_no_expert_loads_to_show() -> None:
    records = [step_record(step, expert_loads=[] if step % 2 else [[10, 30], [20, 20]]) for step in range(12)]
    assert "Expert load" in page("run", "", records, [])
    assert "Expert load" in page("run", "", [step_record(0, expert_loads=[])], [])


def test_lengths_of_what_was_trained_stand_beside_those_posed() -> None:
    record = {
        "kind": "lengths",
        "at": 1.0,
        "step": 3,
        "posed": [0, 0, 6, 2],
        "trained": [0, 0, 6],
        "cut": 1,
        "bias": 0.7,
    }
    text = page("run", "", [*run_records(), record], [])
    for row in ("2 to 3 tokens", "75.0% posed, 100.0% trained", "25.0% posed, 0.0% trained", "0.700"):
        assert row in text


def test_restarts_and_workers_that_left_are_told() -> None:
    records = [
        *run_records(),
        {"kind": "restart", "at": 14.0, "seconds": 2.0, "because": "worker 'buffer' died: SIGKILL"},
        {"kind": "drained", "at": 15.0, "worker": "rollout-1", "finished": 3, "handed_back": 2, "seconds": 1.0},
        {"kind": "continued", "at": 16.0, "worker": "rollout-0", "group": 7, "episodes": 8, "tokens": 300},
        {"kind": "continued", "at": 17.0, "worker": "rollout-0", "group": 9, "episodes": 5, "tokens": 40},
    ]
    text = page("run", "", records, [])
    assert "14 s: started again: worker &#x27;buffer&#x27; died: SIGKILL" in text
    assert "15 s: rollout-1 left: 3 groups finished, 2 went on elsewhere" in text
    assert "13 episodes were finished from where they had been broken off: 340 tokens were not sampled again" in text


def test_the_page_stands_alone_and_tells_the_run() -> None:
    text = page("run", "[run]\nseed = 0\n", run_records(), [episode_record(3)])
    parser = parsed(text)
    assert parser.outside == []
    assert "http" not in text
    assert parser.tags.count("svg") >= 7
    for fact in (
        "0.20 → 0.75",
        "age 2",
        "SIGKILL",
        "version 5 refused: digest",
        "dropped: no_signal",
        "decode 7.5 s (75.0 %)",
    ):
        assert fact in text


def test_placing_experts_is_told_where_it_was_done() -> None:
    records = run_records()
    assert "3 times; last: 1.20 before, 1.04 after, 1.90 in order" in page("r", "", records, [])
    for record in records:
        record.pop("placed", None)  # as runs of earlier versions wrote them
    assert "Placement of experts" not in page("r", "", records, [])


def test_replayed_experts_are_told_where_there_were_any() -> None:
    records = run_records()
    assert "Routing replay" not in page("r", "", records, [])
    told = {"replayed_tokens": 90, "routes_differ": (0.25, 0.5), "routes_missing": 3, "routes_dropped": 1}
    steps = [step_record(step, **told) for step in range(2)]
    made = page("r", "", [*steps, *records], [])
    assert "Routing replay" in made
    assert "MoE layer 1" in made
    assert "Without recorded experts: 6 tokens; samples left out for it: 2." in made
    alone = page("r", "", [step_record(0, routes_missing=7, replayed_tokens=0)], [])  # nothing came with experts
    assert "Without recorded experts: 7 tokens" in alone


def test_a_critic_is_told_of_where_there_was_one() -> None:
    assert ">Critic<" not in page("r", "", run_records(), [])
    told = {"critic_updates": 2, "value_loss": 0.0625, "explained_variance": -0.5, "value_clipped": 0.1}
    made = page("r", "", [step_record(step, **told) for step in range(3)], [])
    assert ">Critic<" in made
    assert "explained variance" in made


def test_a_run_that_wrote_nothing_yet_has_a_page() -> None:
    assert "nothing recorded" in page("run", "", [], [])


def test_model_text_cannot_leave_its_place() -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    episode = {**EPISODE, "pieces": [evil], "roles": ["model"]}
    text = page(evil, evil, run_records(), [episode_record(1, prompt=evil, episodes=[episode])])
    parser = parsed(text)
    assert "img" not in parser.tags
    assert parser.tags.count("script") == 2
    data = re.search(r'<script type="application/json" id="episodes">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])[0]["episodes"][0]["pieces"] == [evil]


def test_long_runs_keep_the_newest_episodes_and_an_even_choice_of_old_ones() -> None:
    kept = thin([{"step": step} for step in range(5000)])
    assert len(kept) <= 400
    assert kept[-1]["step"] == 4999
    assert kept[0]["step"] < 15


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.dictionaries(st.text(max_size=5), st.lists(st.tuples(finite, finite), max_size=20), max_size=4))
def test_any_curve_can_be_drawn(series: dict[str, list[tuple[float, float]]]) -> None:
    text = curves(series, low=0.0)
    assert "nan" not in text
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', text))):
        assert -1 <= float(x) <= 561
        assert -1 <= float(y) <= 221


def test_bars_fill_their_row() -> None:
    text = shares({"a": {"x": 1.0, "y": 3.0}, "b": {"y": 2.0}})
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', text)]
    assert widths == pytest.approx([285, 95, 380, 0], abs=0.1)  # causes are ordered by their total


def test_empty_drawings_say_so() -> None:
    for text in (curves({}), shares({}), heat([], row_name="layer", column_name="expert")):
        assert "nothing recorded" in text


def test_looks_are_told_with_their_intervals_and_pass_at_k() -> None:
    looks = [
        {
            "kind": "eval", "at": 20.0 + n, "version": {"line": 1, "n": n}, "accuracy": 0.3, "count": 64, "samples": 4,
            "temperature": 0.7, "passed": {"1": 0.3, "4": 0.6}, "intervals": {"correct": [0.2, 0.4]},
        }
        for n in (10, 20)
    ]  # fmt: skip
    text = page("run", "", [*run_records(), *looks], [])
    for told in ("95 % from", "95 % to", "pass@4", "4 answers each, sampled at temperature 0.7,"):
        assert told in text
    assert "95 % from" not in page("run", "", run_records(), [])
