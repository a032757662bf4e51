"""How far the policy recovers after a change, beside the best fixed setting; how fast the simulator is.

python -m bench.balance            # both on simulated time: under a minute on a quiet core

A change comes in the middle: environments that answer five times as late, or answers four times as long. Fixed settings
are swept, each from its start under the changed plant; the policy starts from the setting that was best before.
"""

import argparse
import time
from dataclasses import replace
from typing import Any

from bench.record import write
from contraflow.balance.policy import Bounds, Setting
from contraflow.balance.simulate import Change, Plant, Simulation, groups_a_second
from contraflow.buffer.window import Window

P, ETA, LOOK_S = 16, 3, 120.0
TICKETS = (ETA + 1) * P
BOUNDS = Bounds(groups_per_step=P, tickets=TICKETS, concurrency=(1, 64), workers=(1, 4))
CHANGES: dict[str, tuple[Plant, Change]] = {
    "environments answer 5 times as late": (
        Plant(speed=50.0, rate=2000.0, train_s=8.0, spread=0.5, tokens=60.0, env_s=1.0, turns=2),
        lambda plant: replace(plant, env_s=5 * plant.env_s),
    ),
    "answers are 4 times as long": (
        Plant(speed=50.0, rate=2000.0, train_s=8.0, spread=0.5, tokens=120.0),
        lambda plant: replace(plant, tokens=4 * plant.tokens),
    ),
}


def simulation(plant: Plant, setting: Setting, bounds: Bounds = BOUNDS, *, steered: bool, p: int = P) -> Simulation:
    window = Window(policy="hold", groups_per_step=p, max_age=bounds.tickets // p - 1)
    return Simulation(plant, window, setting, bounds, seed=0, look_s=LOOK_S, steered=steered)


def best_fixed(plant: Plant) -> tuple[Setting, float]:
    """The cheapest setting within 1 % of the most groups a second, and these."""
    found = []
    for workers in range(1, BOUNDS.workers[1] + 1):
        for concurrency in (2, 4, 8, 16, 24, 32, 48, 64):
            setting = Setting(concurrency=concurrency, workers=workers, tickets=TICKETS)
            looks = simulation(plant, setting, steered=False).run(1500.0)
            found.append((setting, groups_a_second(looks, 300.0)))
    most = max(rate for _, rate in found)
    return next((setting, rate) for setting, rate in found if rate >= 0.99 * most)


def recover(name: str, plant: Plant, change: Change) -> dict[str, Any]:
    before, rate_before = best_fixed(plant)
    after, rate_after = best_fixed(change(plant))
    unmoved = groups_a_second(simulation(change(plant), before, steered=False).run(1500.0), 300.0)
    one = simulation(plant, before, steered=True)
    looks = one.run(6 * 3600.0, {1800.0: change})
    settled = groups_a_second(looks, 4 * 3600.0)
    within = [look.at_s for look in looks if look.at_s > 1800.0 and look.measured.finished >= 0.9 * rate_after]
    return {
        "what": name,
        "best_before": vars(before), "groups_s_before": round(rate_before, 3),
        "best_after": vars(after), "groups_s_best_after": round(rate_after, 3),
        "groups_s_unmoved": round(unmoved, 3),
        "groups_s_steered": round(settled, 3), "of_best": round(settled / rate_after, 3),
        "seconds_to_90_percent": round(within[0] - 1800.0) if within else None,
        "ends_at": vars(looks[-1].setting), "oldest_age": one.oldest_age,
    }  # fmt: skip


def thousand_gpus(hours: float) -> dict[str, Any]:
    """125 engines of 8 GPUs, 256 groups of 16 answers a step, of 4,000 tokens in the mean and 16,000 at most."""
    plant = Plant(speed=60.0, rate=20_000.0, train_s=30.0, refresh_s=1.0, start_s=120.0, episodes=16, tokens=4000.0,
                  spread=0.8, longest=16_000.0)  # fmt: skip
    bounds = Bounds(groups_per_step=256, tickets=3 * 256, concurrency=(1, 64), workers=(1, 125))
    one = simulation(plant, Setting(concurrency=8, workers=125, tickets=768), bounds, steered=True, p=256)
    began = time.perf_counter()
    one.run(hours * 3600.0)
    seconds = time.perf_counter() - began
    return {"what": "1,000 GPUs, simulated hours", "hours": hours, "seconds": round(seconds, 1), "steps": one.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="simulated, of 1,000 GPUs")
    options = parser.parse_args()
    rows = [thousand_gpus(options.hours)]
    print(rows[0])
    for name, (plant, change) in CHANGES.items():
        rows.append(recover(name, plant, change))
        print(rows[-1])
    print("wrote", write("balance_simulated", rows))


if __name__ == "__main__":
    main()
