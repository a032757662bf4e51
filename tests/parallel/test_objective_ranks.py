"""A whole step with ratios by sequence, a proximal policy and penalties in the reward: on several ranks as on one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist

from contraflow.config import Critic as CriticSection
from contraflow.config import Loss, Parallel, Train
from contraflow.parallel.mesh import open_mesh
from contraflow.parallel.spread import Spread, load_spread
from contraflow.telemetry import Account
from contraflow.train.checkpoint import Cut, Snapshot, commit
from contraflow.train.checkpoint import load as load_cut
from contraflow.train.crew import open_crew
from contraflow.train.critic import Critic
from contraflow.train.critic_cut import Opened, load_critic, new_critic
from contraflow.train.optimizer import Optimizer
from contraflow.train.step import Beside, Numbers, TrainStep
from tests.cut_writer import space_in
from tests.dispatch import gloo
from tests.parallel.equal import difference, make_folder, samples

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
LOSSES = [
    Loss(surrogate="gspo", old="proximal", corrections={"geometric_mask": (0.1, 0.4), "tis": (0.1, 0.3)}),
    Loss(surrogate="cispo", advantages="reinforce++", kl_in="reward", kl_kind="k1", kl_weight=0.1),
]
TRAIN = Train(warmup_updates=0, clip_norm=0.5, updates=2, tokens_per_batch=40)


def step_on(spread: Spread, reference: Spread, loss: Loss) -> tuple[Numbers, dict[str, Any]]:
    account = Account(lambda: 0.0)
    crew = open_crew(spread.decoder, spread.mesh, account, temperature=0.9)
    step = TrainStep(
        spread.decoder,
        Optimizer(spread.decoder, TRAIN, spread),
        account,
        train=TRAIN,
        loss=loss,
        temperature=0.9,
        beside=Beside(reference=reference.decoder.requires_grad_(False)),
        crew=crew,
    )
    by_group = [[msgspec.structs.replace(s, behaviour=3 * s.behaviour) for s in samples(3, seed=n)] for n in range(6)]
    outcome = step.run(by_group, step=4, seed=2)
    assert outcome.fault == ""
    return outcome.numbers, dict(spread.tensors())


def on_ranks(store: Any, rank: int, cases: Sequence[tuple[Parallel, Loss]], folder: Path, meeting: Path) -> list[Any]:
    dist.barrier()
    dist.destroy_process_group()
    seen = []
    for index, (parallel, loss) in enumerate(cases):
        with open_mesh(parallel, rank=rank, init_method=f"file://{meeting}/{index}") as mesh:
            seen.append(step_on(load_spread(folder, mesh), load_spread(folder, mesh), loss))
    return seen


def check(layouts: Sequence[Parallel], world: int, tmp_path: Path) -> None:
    folder = make_folder("qwen3_moe", tmp_path, 4)
    cases = [(parallel, loss) for parallel in layouts for loss in LOSSES]
    by_rank = gloo.run(on_ranks, world, tmp_path, cases, folder, tmp_path)
    for place, (parallel, loss) in enumerate(cases):
        numbers, weights = step_on(load_spread(folder, None), load_spread(folder, None), loss)
        assert numbers.updates == 2
        if loss.corrections:
            assert all(0 < share < 1 for share in numbers.corrected.values())
        for rank in by_rank:
            found = rank[place][0]
            for name in ("loss", "kl", "entropy", "ratio_mean", "clipped_high", "effective", "grad_norm"):
                assert getattr(found, name) == pytest.approx(getattr(numbers, name), rel=1e-4, abs=1e-7), (
                    parallel,
                    name,
                )
            assert found.corrected == pytest.approx(numbers.corrected)
        for name, wanted in weights.items():
            assert difference(by_rank[0][place][1][name], wanted) <= 1e-5, (parallel, loss.surrogate, name)


def test_two_ranks_step_as_one(tmp_path: Path) -> None:
    check([Parallel(dp=2, ep=2), Parallel(cp=2)], 2, tmp_path)


@pytest.mark.slow
def test_stages_and_heads_on_two_ranks_step_as_one(tmp_path: Path) -> None:
    check([Parallel(tp=2), Parallel(pp=2)], 2, tmp_path)


@pytest.mark.slow
def test_four_ranks_step_as_one(tmp_path: Path) -> None:
    check([Parallel(dp=2, ep=4, cp=2), Parallel(dp=2, pp=2), Parallel(cp=2, tp=2, ep=2)], 4, tmp_path)


# --- with a critic ---------------------------------------------------------------------------------------------------

GAE = Loss(advantages="gae")
CRITICS = [CriticSection(discount=0.9, unit="turn"), CriticSection(trunk="shared", weight=0.5, clip=0.05)]


class Ppo(NamedTuple):
    """A trainer of both."""

    step: TrainStep
    policy: Spread
    optimizer: Optimizer
    critic: Critic

    def tensors(self) -> dict[str, Any]:
        """Whole, of policy and critic; on rank 0."""
        found = {f"policy.{name}": tensor for name, tensor in self.policy.tensors()}
        found |= {f"head.{name}": weight.detach().clone() for name, weight in self.critic.head.named_parameters()}
        trunk = self.critic.trunk
        return found if trunk is None else found | {f"critic.{name}": tensor for name, tensor in trunk.tensors()}


def ppo_of(policy: Spread, opened: Opened, section: CriticSection, moments: Any = None) -> Ppo:
    account = Account(lambda: 0.0)
    value = opened.head if opened.trunk is None else None
    crew = open_crew(policy.decoder, policy.mesh, account, temperature=0.9, value=value)
    critic = Critic(section, opened.head, train=TRAIN, trunk=opened.trunk, crew=crew, account=account)
    opened.resume(critic)
    optimizer = Optimizer(policy.decoder, TRAIN, policy)
    if moments is not None:
        optimizer.load(moments, opened.updates)
    step = TrainStep(
        policy.decoder,
        optimizer,
        account,
        train=TRAIN,
        loss=GAE,
        temperature=0.9,
        beside=Beside(critic=critic),
        crew=crew,
    )
    return Ppo(step, policy, optimizer, critic)


def new_ppo(folder: Path, mesh: Any, section: CriticSection) -> Ppo:
    policy = load_spread(folder, mesh)
    opened = new_critic(section, folder, policy, {})
    with torch.no_grad():
        opened.head.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    return ppo_of(policy, opened, section)


def steps_of(ppo: Ppo, steps: Sequence[int]) -> Numbers:
    for at in steps:
        given = [
            [msgspec.structs.replace(s, truncated=n % 2 == 0) for s in samples(3, seed=9 * at + n)] for n in range(6)
        ]
        outcome = ppo.step.run(given, step=at, seed=2)
        assert outcome.fault == ""
    return outcome.numbers


def ppo_on(folder: Path, mesh: Any, section: CriticSection) -> tuple[Numbers, dict[str, Any]]:
    """Two steps; every whole tensor of policy and critic after them."""
    ppo = new_ppo(folder, mesh, section)
    return steps_of(ppo, range(2)), ppo.tensors()


def ppo_on_ranks(store: Any, rank: int, cases: Sequence[Any], folder: Path, meeting: Path) -> list[Any]:
    dist.barrier()
    dist.destroy_process_group()
    seen = []
    for index, (parallel, section) in enumerate(cases):
        with open_mesh(parallel, rank=rank, init_method=f"file://{meeting}/ppo-{index}") as mesh:
            seen.append(ppo_on(folder, mesh, section))
    return seen


def check_ppo(layouts: Sequence[Parallel], world: int, tmp_path: Path) -> None:
    folder = make_folder("qwen3_moe", tmp_path, 4)
    cases = [(parallel, section) for parallel in layouts for section in CRITICS]
    by_rank = gloo.run(ppo_on_ranks, world, tmp_path, cases, folder, tmp_path)
    names = ("loss", "grad_norm", "value_loss", "value_clipped", "critic_grad_norm", "explained_variance")
    for place, (parallel, section) in enumerate(cases):
        numbers, weights = ppo_on(folder, None, section)
        assert (numbers.critic_updates, numbers.values_version) == (2, 1)
        for rank in by_rank:
            for name in names:
                wanted = pytest.approx(getattr(numbers, name), rel=2e-4, abs=1e-6)
                assert getattr(rank[place][0], name) == wanted, (parallel, section.trunk, name)
            for name in ("head.weight", "head.bias"):
                assert torch.equal(rank[place][1][name], by_rank[0][place][1][name])
        for name, wanted in weights.items():
            assert difference(by_rank[0][place][1][name], wanted) <= 2e-5, (parallel, section.trunk, name)


def test_a_critic_steps_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    check_ppo([Parallel(dp=2, ep=2), Parallel(cp=2)], 2, tmp_path)


@pytest.mark.slow
def test_a_critic_steps_on_stages_and_heads_as_on_one(tmp_path: Path) -> None:
    check_ppo([Parallel(tp=2), Parallel(pp=2)], 2, tmp_path)


@pytest.mark.slow
def test_a_critic_steps_on_four_ranks_as_on_one(tmp_path: Path) -> None:
    check_ppo([Parallel(dp=2, ep=4, cp=2), Parallel(dp=2, pp=2), Parallel(cp=2, tp=2, ep=2)], 4, tmp_path)


def snapshot_of(ppo: Ppo, folder: Path) -> Snapshot:
    cut = Cut(line=0, step=1, updates=ppo.optimizer.updates, seed=2, model=ppo.policy.config.digest(), recipe="r")
    return Snapshot(cut, spread=ppo.policy, optimizer=ppo.optimizer, companions=folder, critic=ppo.critic)


def resumed(cuts: Path, mesh: Any, section: CriticSection) -> Ppo:
    space = space_in(cuts)
    loaded = load_cut(space, "line-0-step-1", mesh)
    opened = load_critic(space, loaded.manifest, loaded.cut.critic, section, loaded.spread, {})
    return ppo_of(loaded.spread, opened, section, loaded.moments)


def cut_on_ranks(store: Any, rank: int, sections: Sequence[CriticSection], folder: Path, meeting: Path) -> list[Any]:
    """Per section: this rank's parts of a cut after one step, and whole tensors of one resumed from a single rank's."""
    dist.barrier()
    dist.destroy_process_group()
    seen = []
    with open_mesh(Parallel(dp=2, ep=2), rank=rank, init_method=f"file://{meeting}/cut") as mesh:
        for section in sections:
            ppo = new_ppo(folder, mesh, section)
            steps_of(ppo, [0])
            snapshot = snapshot_of(ppo, folder)
            parts = snapshot.write(space_in(meeting / f"many-{section.trunk}"), "w")
            again = resumed(meeting / f"one-{section.trunk}", mesh, section)
            steps_of(again, [1])
            seen.append((snapshot.cut, parts, again.tensors()))
    return seen


def test_a_critics_cut_goes_on_at_another_world_size(tmp_path: Path) -> None:
    folder, wanted = make_folder("qwen3_moe", tmp_path, 2), {}
    for section in CRITICS:
        ppo = new_ppo(folder, None, section)
        steps_of(ppo, [0])
        space, snapshot = space_in(tmp_path / f"one-{section.trunk}"), snapshot_of(ppo, folder)
        commit(space, snapshot.cut, "w", snapshot.write(space, "w"), keep=9, about={})
        alone = resumed(tmp_path / f"one-{section.trunk}", None, section)
        for each in (ppo, alone):
            steps_of(each, [1])
        wanted[section.trunk] = ppo.tensors()
        assert all(torch.equal(of, alone.tensors()[name]) for name, of in ppo.tensors().items())
    by_rank = gloo.run(cut_on_ranks, 2, tmp_path, CRITICS, folder, tmp_path)
    for place, section in enumerate(CRITICS):
        space = space_in(tmp_path / f"many-{section.trunk}")
        parts = [part for rank in by_rank for part in rank[place][1]]
        commit(space, by_rank[0][place][0], "w", parts, keep=9, about={})
        fewer = resumed(tmp_path / f"many-{section.trunk}", None, section)
        steps_of(fewer, [1])
        for name, of in wanted[section.trunk].items():
            assert difference(by_rank[0][place][2][name], of) <= 2e-5, (section.trunk, name)
            assert difference(fewer.tensors()[name], of) <= 2e-5, (section.trunk, name)
