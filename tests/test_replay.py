"""What was recorded, trained again from a cut, gives the cuts that followed bit for bit, or it is said why not; and
sampled again it gives the same tokens."""

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from contraflow.buffer.ledger import FILE
from contraflow.buffer.recorded import Recorded
from contraflow.buffer.segments import FOLDER, Place, Segments, read_group
from contraflow.config import Engine, Parallel, Server
from contraflow.errors import CheckpointError, ConfigError, LedgerError, PayloadError, ReplayError
from contraflow.replay import replay
from contraflow.replay.sampling import check_repeats
from contraflow.run import run_recipe
from contraflow.types import Episode, Group, Span, Version
from tests.test_loop import Silent, Ticks, recipe_of, run

Copied = Callable[[str], Path]

KEEP = {"train": {"checkpoint_every": 2, "keep_checkpoints": 9}, "run": {"steps": 5, "eval_tasks": 0}}
PAYLOADS = {"keep_payloads": "all"}
NATIVE = {"kind": "native", "context_tokens": 48, "kv_tokens": 2048, "max_sequences": 32}
TURNS = """
from contraflow.envs.base import Observation
from contraflow.types import Task

class ThreeTurns:
    \"\"\"A wrong answer is met with a few more characters, twice.\"\"\"
    name = "three-turns"
    bounded = True

    def __init__(self, options): pass

    def task(self, split, index): return Task(key=f"{split}/{index}", prompt=f"{index}+1=", reference=str(index + 1))

    def open(self, task): return Answers(task)

class Answers:
    def __init__(self, task): self.turns, self.task = 0, task

    def step(self, action):
        self.turns += 1
        return Observation(f"{self.turns}+", self.turns == 3 or action == self.task.reference)

def letters(task, transcript):
    \"\"\"Something that random answers differ in.\"\"\"
    said = "".join(turn.text for turn in transcript.turns if turn.role == "model")
    return sum(letter.isalpha() for letter in said) / max(len(said), 1)
"""


def again(folder: Path, cut: str = "line-0-step-2", *, sample: bool = False) -> tuple[int, list[str]]:
    told: list[str] = []
    return replay(folder, cut, clock=Ticks(), tell=told.append, sample=sample), told


def rows(told: list[str]) -> list[list[str]]:
    """The table's numbers: pieces, alike, tokens, alike of what was the same, leant on an old cache, and is gone."""
    return [line.split()[:4] for line in told[-3:]]


@pytest.fixture(scope="module")
def runs(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished run with all its payloads, for each way to sample.

    The native ones have several turns, answers that a refresh falls into, and weights that move at every step.
    """
    place = tmp_path_factory.mktemp("runs")
    env = place / "turns.py"
    env.write_text(TURNS)
    made: dict[str, dict[str, Any]] = {"scripted": {}}
    for on_refresh in ("keep", "recompute"):
        made[on_refresh] = {
            "engine": {**NATIVE, "on_refresh": on_refresh},
            "env": {"name": f"{env}:ThreeTurns"},
            "rollout": {"max_new_tokens": 40, "max_turns": 3},
            "reward": {"parts": {f"{env}:letters": 1.0}},
        }
    for name, sections in made.items():
        run(recipe_of(tiny_moe, buffer=PAYLOADS, **KEEP, **sections), place / name)
    return {name: place / name for name in made}


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(runs[name], tmp_path / name))


def test_recorded_takes_give_every_later_cut_bit_for_bit(runs: dict[str, Path]) -> None:
    equal, told = again(runs["scripted"])
    assert equal == 2
    assert told[0] == "step 2: 4 groups trained again"
    assert told[1:] == [
        f"step {step}: weights and optimizer are those of cut line-0-step-{step + 1}, bit for bit" for step in (3, 4)
    ]


def test_another_recipe_is_found_out(copied: Copied) -> None:
    folder = copied("scripted")
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.replace("clip_norm = 1.0", "clip_norm = 0.01"))
    with pytest.raises(CheckpointError, match="the replay differs from cut line-0-step-4"):
        again(folder)


def test_payloads_that_were_let_go_are_an_error_that_says_so(copied: Copied) -> None:
    folder = copied("scripted")
    with closing(sqlite3.connect(folder / FILE)) as db, db:
        db.execute("DELETE FROM payloads")  # as a cut does once a file is full and all in it is trained
    with pytest.raises(LedgerError, match=r"was let go; run with buffer\.keep_payloads = 'all'"):
        again(folder)
    with pytest.raises(LedgerError, match="nothing is recorded after cut line-0-step-5"):
        again(folder, "line-0-step-5")
    with pytest.raises(CheckpointError, match="line-0-step-3"):
        again(folder, "line-0-step-3")


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_critic_is_trained_again_with_its_policy(tiny_moe: Path, tmp_path: Path, trunk: str) -> None:
    env = tmp_path / "turns.py"
    env.write_text(TURNS)
    recipe = recipe_of(
        tiny_moe,
        **KEEP,
        engine=NATIVE,
        env={"name": f"{env}:ThreeTurns"},
        rollout={"max_new_tokens": 12, "max_turns": 3},
        reward={"parts": {f"{env}:letters": 1.0}},
        buffer={**PAYLOADS, "no_signal": "keep"},
        loss={"advantages": "gae"},
        critic={"trunk": trunk, "unit": "turn", "warmup_steps": 1},
    )
    run(recipe, tmp_path / "run")
    assert again(tmp_path / "run")[0] == 2


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize(
    "parallel",
    [
        {"dp": 2, "ep": 2},
        pytest.param({"dp": 4, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_ranks_give_the_same_weights_again(tiny_moe: Path, tmp_path: Path, parallel: dict[str, int]) -> None:
    train = {**KEEP["train"], "parallel": parallel}
    recipe = recipe_of(
        tiny_moe, buffer=PAYLOADS, train=train, run={"steps": 4, "eval_tasks": 0}, runtime={"kind": "local"}
    )
    run_recipe(recipe, tmp_path, resume=False, clock=time.monotonic, view=Silent())
    told: list[str] = []
    assert replay(tmp_path, "line-0-step-2", clock=time.monotonic, tell=told.append, sample=True) == 1
    assert any("bit for bit" in line for line in told)


def test_the_scripted_engine_says_the_same_again(runs: dict[str, Path]) -> None:
    equal, told = again(runs["scripted"], sample=True)
    same, kept, gone = rows(told)
    assert equal == 2
    assert same[0] == same[1] != "0"
    assert same[2] == same[3] != "0"
    assert kept[:4:2] == kept[1::2]  # nothing moved, so answers end as those who began them would
    assert int(gone[0]) > 0  # what versions 0 and 1 sampled for step 2
    assert int(same[0]) + int(kept[0]) + int(gone[0]) >= 3 * 4 * 4  # one turn each, one version or several


@pytest.mark.parametrize("on_refresh", ["recompute", "keep"])
def test_the_native_engine_samples_the_same_again(runs: dict[str, Path], on_refresh: str) -> None:
    equal, told = again(runs[on_refresh], sample=True)
    same, kept, gone = rows(told)
    assert equal == 2
    assert same[0] == same[1] != "0"
    assert same[2] == same[3] != "0"
    assert int(gone[0]) > 0
    if on_refresh == "keep":
        assert int(kept[0]) > int(kept[1]), "the old cache makes a difference here, or this test shows nothing"
    else:
        assert kept[0] == "0"


def alter(folder: Path, change: Callable[[Episode], Episode], *, oldest: int) -> None:
    """Change the first episode of a recorded group, digests and all: one that versions from `oldest` on sampled."""
    with closing(sqlite3.connect(folder / FILE)) as db, db:
        found = db.execute("SELECT group_id, attempt, segment, start, length, digest FROM payloads ORDER BY group_id")
        groups = ((row[:2], read_group(folder, Place(*row[2:]))) for row in found.fetchall())
        key, group = next((key, group) for key, group in groups if group.oldest and group.oldest.n >= oldest)
        first, *others = group.episodes
        changed = msgspec.structs.replace(group, episodes=(change(first), *others))
        place = reseal(folder, changed)
        db.execute(
            "UPDATE payloads SET segment = ?, start = ?, length = ?, digest = ? WHERE group_id = ? AND attempt = ?",
            (place.segment, place.start, place.length, place.digest, *key),
        )


def reseal(folder: Path, group: Group) -> Place:
    segments = Segments(folder, line=99, segment_bytes=1 << 20)
    (place,) = segments.write([group])
    segments.close()
    return place


def another_token(episode: Episode) -> Episode:
    tokens, at = episode.tokens.copy(), int(np.flatnonzero(episode.trained)[1])
    tokens[at] = tokens[at] ^ 1
    return msgspec.structs.replace(episode, tokens=tokens)


def another_logprob(episode: Episode) -> Episode:
    logprobs, at = episode.logprobs.copy(), int(np.flatnonzero(episode.trained)[1])
    logprobs[at] -= 2e-4
    return msgspec.structs.replace(episode, logprobs=logprobs)


def another_version(episode: Episode) -> Episode:
    spans = [Span(Version(span.version.line, span.version.n + 1), span.start, span.end) for span in episode.spans]
    return msgspec.structs.replace(episode, spans=tuple(spans))


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        ("scripted", another_token, "token"),
        ("scripted", another_logprob, "log-probability of token"),
        ("recompute", another_token, "token"),
        ("recompute", another_logprob, "log-probability of token"),
        ("recompute", another_version, ""),
    ],
)
def test_a_payload_that_was_changed_is_found_by_sampling_it_again(
    copied: Copied, kind: str, change: Callable[[Episode], Episode], what: str
) -> None:
    folder = copied(kind)
    for later in (folder / "checkpoints" / "manifests").iterdir():
        if later.name != "line-0-step-2":
            later.unlink()  # they would find it too, but for a version, which no weight depends on
    alter(folder, change, oldest=2)
    with pytest.raises(
        ReplayError, match=rf"\d+ of \d+ pieces came out otherwise, first group \d+, .*episode 0.*{what}"
    ):
        again(folder, sample=True)


@pytest.mark.parametrize("sample", [False, True])
def test_a_payload_with_a_flipped_bit_is_refused_by_name(copied: Copied, sample: bool) -> None:
    folder = copied("scripted")
    with closing(sqlite3.connect(folder / FILE)) as db:
        segment, start = db.execute(
            "SELECT segment, start FROM payloads JOIN events USING (group_id, attempt)"
            " WHERE kind = 'taken' AND step = 3"
        ).fetchone()
    data = bytearray((folder / FOLDER / segment).read_bytes())
    data[start + 500] ^= 4
    (folder / FOLDER / segment).write_bytes(data)
    with pytest.raises(PayloadError, match=segment):
        again(folder, sample=sample)


def test_a_version_that_the_surviving_history_lacks_keeps_its_line(copied: Copied, tiny_moe: Path) -> None:
    folder = copied("scripted")
    run(recipe_of(tiny_moe, buffer=PAYLOADS, train=KEEP["train"], run={"steps": 8}), folder, resume=True)

    def lines(shared: int) -> set[tuple[int, bool]]:
        """Lines that versions are named of, and whether they are of what both lines have."""
        with closing(sqlite3.connect(folder / FILE)) as db, db:
            db.execute("UPDATE lines SET shared = ? WHERE line = 1", (shared,))
        record = Recorded(folder, line=0, first_step=2, max_age=2)
        chosen = tuple(each for take in asyncio.run(record.takes()) for each in take.groups)
        groups = asyncio.run(record.as_sampled(chosen))
        spans = [span for group in groups for episode in group.episodes for span in episode.spans]
        return {(span.version.line, span.version.n <= shared) for span in spans}

    assert {line for line, _ in lines(5)} == {1}
    assert (0, False) in lines(3)
    assert (0, True) not in lines(3)


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"kind": "vllm", "server": Server(urls=("http://localhost:1",))}, "engine.kind = 'vllm'"),
        ({"kind": "native", "compute": "bfloat16"}, "engine.compute = 'bfloat16'"),
        ({"kind": "native", "parallel": Parallel(dp=2, ep=2, wire="fp8")}, "engine.parallel.wire = 'fp8'"),
    ],
)
def test_engines_that_do_not_repeat_are_refused(engine: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be sampled again, {named}"):
        check_repeats(Engine.model_validate(engine))
    check_repeats(Engine(kind="scripted", compute="bfloat16"))
