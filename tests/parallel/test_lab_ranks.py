"""The laboratory on several ranks: what it tells of a take, and the weights it leaves, are those of one rank."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from contraflow.config import Parallel
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.spread import Spread, load_spread
from contraflow.telemetry import Account
from contraflow.train.crew import open_crew
from contraflow.train.lab import Bench, Lab
from contraflow.train.report import Mismatch
from contraflow.types import Group, Span, Version
from tests.parallel import ranks
from tests.parallel.equal import make_folder
from tests.train.conftest import MakeEpisode, MakeGroup, make_episode, make_group

__all__ = ["make_episode", "make_group"]

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
TWO = [Parallel(dp=2, ep=2), Parallel(dp=2), Parallel(cp=2, ep=2), Parallel(tp=2)]
FOUR = [Parallel(dp=2, cp=2, ep=4), Parallel(dp=4, ep=2), Parallel(dp=2, tp=2, ep=2)]


def moved(spread: Spread, parts: int) -> None:
    """Every weight by a hundredth and more, alike however it is cut."""
    with torch.no_grad():
        for weight in spread.decoder.parameters():
            weight.mul_(1 + 0.02 * parts)


def looked(mesh: Mesh | None, folder: Path, takes: list[list[Group]]) -> tuple[list[Mismatch], bool]:
    """Of every take, with versions 0 to 2 kept and the last one held; and whether the weights came back bit for bit."""
    spread = load_spread(folder, mesh)
    crew = open_crew(spread.decoder, mesh, Account(lambda: 0.0), temperature=0.7)
    bench = Bench(tokens=200, versions=3, temperature=0.7, keeps_cache=True, seed=3, tokens_per_batch=40)
    lab = Lab(spread.decoder, bench, crew)
    for n in range(3):
        moved(spread, n)
        lab.keep(Version(1, n))
    before = {name: None if whole is None else whole.clone() for name, whole in spread.tensors()}
    told = [lab.examine(take, Version(1, 2)) for take in takes]
    same = all(whole is None or torch.equal(whole, before[name]) for name, whole in spread.tensors())
    return told, same


@pytest.fixture
def takes(make_episode: MakeEpisode, make_group: MakeGroup) -> list[list[Group]]:
    """Many episodes, some refreshed and of several turns, with experts; too few for every rank; of unknown versions;
    none."""
    episodes, chance = [], np.random.default_rng(4)
    for place in range(13):
        one = make_episode(8 + place, seed=place, versions=[(0,), (0, 1, 2), (1, 2), (2,)][place % 4])
        if (
            place == 3
        ):  # a second turn, begun by an older version than the first: the episode went on at a worker behind
            parts = [(1, 2, 4), (2, 4, 6), (0, 8, 9), (1, 9, 11)]
            spans = tuple(Span(Version(1, n), start, end) for n, start, end in parts)
            trained = np.isin(np.arange(11), [6, 7], invert=True) & one.trained
            one = msgspec.structs.replace(one, spans=spans, trained=trained)
        if place % 2:
            routes = chance.random((one.tokens.size - 1, 3, 8)).argsort(-1)[..., :3].astype(np.uint8)
            one = msgspec.structs.replace(one, routes=routes)
        episodes.append(one)
    unknown = make_episode(9, versions=(7,))
    return [[make_group(episodes)], [make_group(episodes[1:2])], [make_group([unknown])], []]


def check(layouts: list[Parallel], folder: Path, tmp_path: Path, takes: list[list[Group]]) -> None:
    wanted, same = looked(None, folder, takes)
    many = wanted[0]
    assert same
    assert many.refreshed > 0
    assert many.routed > 0
    assert min(many.parts[cause]["size"] for cause in ("numerics", "cache", "staleness")) > 1e-3
    for parallel in layouts:
        for told, restored in ranks.run(looked, parallel, tmp_path, folder, takes):
            assert restored
            for found, known in zip(told, wanted, strict=True):
                assert flat(found) == pytest.approx(flat(known), rel=1e-5, abs=1e-5), parallel


def flat(told: Mismatch) -> dict[str, float]:
    plain = msgspec.to_builtins(told)
    parts = {f"{cause}.{name}": value for cause, of in plain.pop("parts").items() for name, value in of.items()}
    differ = {f"differ.{layer}": share for layer, share in enumerate(plain.pop("routes_differ"))}
    plain.pop("host_bytes")  # of tensor ranks, which all keep what they hold alike, it is more
    return plain | parts | differ


def test_two_ranks_see_what_one_sees(tmp_path: Path, takes: list[list[Group]]) -> None:
    check(TWO[:1], make_folder("olmoe", tmp_path), tmp_path, takes)


@pytest.mark.slow
def test_two_ranks_of_every_layout_without_stages_see_what_one_sees(tmp_path: Path, takes: list[list[Group]]) -> None:
    check(TWO[1:], make_folder("olmoe", tmp_path), tmp_path, takes)


@pytest.mark.slow
def test_four_ranks_see_what_one_sees(tmp_path: Path, takes: list[list[Group]]) -> None:
    check(FOUR, make_folder("olmoe", tmp_path), tmp_path, takes)


def bytes_of(mesh: Mesh | None, folder: Path) -> int:
    spread = load_spread(folder, mesh)
    crew = open_crew(spread.decoder, mesh, Account(lambda: 0.0), temperature=1.0)
    lab = Lab(spread.decoder, Bench(tokens=9, versions=2, temperature=1.0, keeps_cache=True, seed=3), crew)
    lab.keep(Version(1, 0))
    return lab.examine([], Version(1, 0)).host_bytes


def test_ranks_keep_no_more_than_their_parts(tmp_path: Path) -> None:
    folder = make_folder("olmoe", tmp_path)
    assert ranks.run(bytes_of, Parallel(dp=2, ep=2), tmp_path, folder) == [bytes_of(None, folder)] * 2
