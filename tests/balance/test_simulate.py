"""The simulator against closed forms, the invariants it shares with real runs, and its own determinism."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.balance.policy import Bounds, Setting
from contraflow.balance.simulate import Plant, Simulation, groups_a_second
from contraflow.buffer.window import Window

P = 8
PLANT = Plant(speed=10.0, rate=1e9, train_s=4.0, episodes=2, tokens=60.0)  # 6 s a group, however many there are


def simulation(
    plant: Plant, *, eta: int, concurrency: int = 1000, workers: int = 1, seed: int = 0, steered: bool = False
) -> Simulation:
    tickets = (eta + 1) * P
    return Simulation(
        plant,
        Window(policy="hold", groups_per_step=P, max_age=eta),
        Setting(concurrency=concurrency, workers=workers, tickets=tickets),
        Bounds(groups_per_step=P, tickets=tickets, concurrency=(1, 1000), workers=(1, 64)),
        seed=seed,
        look_s=100.0,
        steered=steered,
    )


@pytest.mark.parametrize(
    ("eta", "plant", "step_s"),
    [
        (0, PLANT, 6.0 + 4.0),  # synchronous: generate, then train
        (0, replace(PLANT, refresh_s=1.0), 6.0 + 4.0 + 1.0),
        (0, replace(PLANT, env_s=2.0, turns=3), 3 * (6.0 + 2.0) + 4.0),
        (1, replace(PLANT, tokens=20.0), 4.0),  # asynchronous, training the slower: its time alone
        (1, PLANT, (6.0 + 4.0) / 2),  # two lots of P tickets, each 10 s on its way round
        (4, PLANT, 4.0),  # five lots: more than training can use
        (8, replace(PLANT, rate=10.0, train_s=1.0), P * 2 * 60.0 / 10.0),  # the engine's tokens alone
    ],
)
def test_a_step_takes_what_arithmetic_says(eta: int, plant: Plant, step_s: float) -> None:
    one = simulation(plant, eta=eta)
    one.run(200 * step_s)
    assert one.steps == pytest.approx(200, rel=0.02)


def test_a_cap_on_groups_at_once_binds_by_littles_law() -> None:
    one = simulation(replace(PLANT, train_s=0.1), eta=8, concurrency=5)
    looks = one.run(2000.0)
    assert groups_a_second(looks, 100.0) == pytest.approx(5 / 6.0, rel=0.02)  # groups at once over the time of each
    assert looks[-1].measured.playing == pytest.approx(5, rel=0.02)


def test_two_engines_of_half_the_rate_are_one_of_the_whole() -> None:
    plant = Plant(speed=1000.0, rate=100.0, train_s=0.1, tokens=50.0, episodes=4)
    whole = simulation(plant, eta=3, concurrency=16)
    halves = simulation(replace(plant, rate=50.0), eta=3, concurrency=8, workers=2)
    first, second = (groups_a_second(one.run(3000.0), 300.0) for one in (whole, halves))
    assert first == pytest.approx(100.0 / (50 * 4), rel=0.02)
    assert second == pytest.approx(first, rel=0.02)


@settings(max_examples=25, deadline=None)
@given(
    eta=st.integers(0, 4),
    spread=st.floats(0.0, 1.5),
    seed=st.integers(0, 99),
    workers=st.integers(1, 5),
    train_s=st.floats(0.1, 20.0),
    steered=st.booleans(),
)
def test_no_token_is_older_than_eta_and_no_ticket_is_made_up(
    eta: int, spread: float, seed: int, workers: int, train_s: float, steered: bool
) -> None:
    plant = Plant(speed=10.0, rate=80.0, train_s=train_s, refresh_s=0.5, spread=spread, episodes=2, tokens=30.0)
    one = simulation(plant, eta=eta, concurrency=4, workers=workers, seed=seed, steered=steered)
    looks = one.run(1000.0)
    assert one.steps > 0
    assert one.oldest_age <= eta
    assert all(look.measured.playing <= (eta + 1) * P + 1e-6 for look in looks)
    assert all(look.setting.tickets <= (eta + 1) * P for look in looks)


def test_the_same_seed_is_the_same_run() -> None:
    plant = Plant(speed=10.0, rate=80.0, train_s=2.0, spread=1.0, tokens=60.0)
    runs = [simulation(plant, eta=2, seed=seed, steered=True).run(500.0) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]
