"""What to change so that neither pool waits for the other: a pure decision, with its reason.

Takes what was measured over one look (some seconds), gives the setting for the next. Does not read a clock, start a
worker or know a loop: that is for whoever calls it (a run, or the simulator).

One thing is changed at a time, the next look lets it settle, the one after judges it: what did not help is taken back
and let be for a while. So the policy climbs towards what a model of the plant would give, without needing the model.

Invariant: tickets never exceed (eta + 1) * P, whatever was measured: the age of tokens does not hang on who steers.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

Lever = Literal["concurrency", "workers", "tickets"]

WAITS = 0.10  # of a look: a trainer that waits longer for groups wants more of them
IDLE = 0.02  # of a look: one that waits less has them in plenty
BUSY = 0.85  # of a look: an engine that computes so long has no room for more
EASY = 0.75  # the most that engines would be busy, were one of them to leave
FULL = 0.95  # of the KV cache
CAPPED = 0.90  # of the groups that may be played at once: with so many, the cap is what holds them back
GAIN = 0.2  # of what a change could bring: one that brought less is taken back
PATIENCE = 3  # looks in a row that must show plenty before a worker is sent away
BARRED = 6  # looks for which a lever that did not help is let be; twice as many each further time in a row
MOST_BARRED = 96


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One look at a run. Shares are of the look's seconds, means over workers."""

    finished: float  # groups a second that became ready
    waits: float  # share in which the trainer waited for groups
    busy: float  # share in which engines computed
    playing: float  # groups that were played, all workers together, in the mean
    free: int  # tickets that nobody took
    kv_held: float = 0.0  # share of the KV cache, at its fullest worker
    preempted: int = 0  # sequences that lost their KV
    serving: int = 1  # workers that serve a version


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What can be moved in a run."""

    concurrency: int  # groups that a worker plays at once
    workers: int
    tickets: int  # groups in flight at most, those not trained yet included


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Within which the setting stays; P groups a step, `tickets` is (eta + 1) * P."""

    groups_per_step: int
    tickets: int
    concurrency: tuple[int, int]
    workers: tuple[int, int]

    def within(self, setting: Setting) -> Setting:
        """The nearest setting that is allowed. With fewer than P tickets no step would ever be whole."""
        return Setting(
            concurrency=_clip(setting.concurrency, *self.concurrency),
            workers=_clip(setting.workers, *self.workers),
            tickets=_clip(setting.tickets, min(self.groups_per_step, self.tickets), self.tickets),
        )


@dataclass(frozen=True)
class Trial:
    """A change that has not been judged yet: what was before, groups a second then, and how many it has to bring."""

    lever: Lever
    before: Setting
    finished: float
    wanted: float


@dataclass(frozen=True)
class Memory:
    """What the policy knows of earlier looks; handed in, and out again."""

    trial: Trial | None = None
    settling: bool = False  # the look that ends now began before the last change had its effect
    plenty: int = 0  # looks in a row in which a worker could have been spared
    barred: dict[Lever, int] = field(default_factory=dict)  # looks for which a lever is let be
    failed: dict[Lever, int] = field(default_factory=dict)  # times in a row that a lever did not help

    def after(self, lever: Lever, *, helped: bool) -> "Memory":
        """A lever was judged; nothing is under trial any more."""
        failures = 0 if helped else self.failed.get(lever, 0) + 1
        looks = min(BARRED * 2 ** (failures - 1), MOST_BARRED) if failures else 0
        barred = {
            **{name: left for name, left in self.barred.items() if name != lever},
            **({lever: looks} if looks else {}),
        }
        return replace(self, trial=None, barred=barred, failed={**self.failed, lever: failures})


@dataclass(frozen=True)
class Advice:
    """The setting from now on, why, and what to hand in next time."""

    setting: Setting
    reason: str
    memory: Memory


def steer(now: Measured, setting: Setting, bounds: Bounds, memory: Memory) -> Advice:
    """What to do after one look."""
    legal = bounds.within(setting)
    if legal != setting:
        return Advice(legal, f"brought within bounds: {_told(setting, legal)}", Memory(settling=True))
    memory = replace(memory, barred={lever: left - 1 for lever, left in memory.barred.items() if left > 1})
    if memory.settling:
        return Advice(setting, "the last change takes effect", replace(memory, settling=False))
    if memory.trial:
        helped = now.finished >= memory.trial.wanted
        trial, memory = memory.trial, memory.after(memory.trial.lever, helped=helped)
        if not helped:
            return _take_back(now, setting, trial, memory)
    if now.preempted or now.kv_held > FULL:
        return _relieve(now, setting, bounds, memory)
    if now.waits > WAITS:
        return _more(now, setting, bounds, replace(memory, plenty=0))
    return _fewer(now, setting, bounds, memory)


def _take_back(now: Measured, setting: Setting, trial: Trial, memory: Memory) -> Advice:
    """A change that did not pay is undone, and not tried again for some time."""
    reason = (
        f"{trial.lever} back to {getattr(trial.before, trial.lever)}: with {getattr(setting, trial.lever)},"
        f" {now.finished:.3g} groups/s after {trial.finished:.3g}"
    )
    return Advice(trial.before, reason, replace(memory, settling=True))


def _relieve(now: Measured, setting: Setting, bounds: Bounds, memory: Memory) -> Advice:
    """Preempted sequences are computed again, which costs more than a shorter queue."""
    least = bounds.concurrency[0]
    full = f"the KV cache is full ({now.kv_held:.0%} held, {now.preempted} sequences preempted)"
    if setting.concurrency <= least:
        return Advice(setting, f"{full}, and concurrency at its least, {least}", memory)
    fewer = max(least, setting.concurrency * 4 // 5)
    return Advice(
        replace(setting, concurrency=fewer),
        f"concurrency {setting.concurrency} to {fewer}: {full}",
        replace(memory.after("concurrency", helped=False), settling=True),
    )


def _more(now: Measured, setting: Setting, bounds: Bounds, memory: Memory) -> Advice:
    """The trainer waits: which lever brings more groups, from the cheapest on."""
    waits = f"the trainer waits {now.waits:.0%} of the time"
    at_once = setting.concurrency * now.serving
    tries: list[tuple[Lever, int, str]] = []
    if now.free == 0:
        bound = "tickets; a larger buffer.max_age gives more"
        tries.append(("tickets", setting.tickets + bounds.groups_per_step, "no ticket is free"))
        tries.append(("workers", setting.workers + 1, "no ticket is free: of more engines each is quicker"))
        tries.append(
            ("concurrency", setting.concurrency * 2 // 3, "no ticket is free: of fewer at once each is quicker")
        )
    elif now.busy >= BUSY:
        bound = f"{now.serving} busy engines"
        tries.append(("workers", setting.workers + 1, f"engines compute {now.busy:.0%}"))
    elif now.playing >= CAPPED * at_once:
        bound = f"{at_once} places"
        more = max(setting.concurrency + 1, setting.concurrency * 3 // 2)
        tries.append(("concurrency", more, f"engines compute {now.busy:.0%}, and all {at_once} places are taken"))
    else:
        bound = "what a step costs beside generation"
    for lever, value, because in tries:
        changed = bounds.within(replace(setting, **{lever: value}))
        if changed != setting and lever not in memory.barred:
            return _try(lever, changed, f"{waits}, and {because}", now, setting, memory)
    return Advice(setting, f"{waits}; held back by {bound}", memory)


def _fewer(now: Measured, setting: Setting, bounds: Bounds, memory: Memory) -> Advice:
    """The trainer has all it wants: a worker that is not needed may go, once that has been so for a while."""
    spared = setting.workers - 1
    enough = now.waits < IDLE and spared >= bounds.workers[0] and now.busy * setting.workers <= EASY * spared
    if not enough or "workers" in memory.barred:
        return Advice(setting, "in balance", replace(memory, plenty=0))
    if memory.plenty + 1 < PATIENCE:
        return Advice(setting, "a worker could be spared", replace(memory, plenty=memory.plenty + 1))
    reason = f"workers {setting.workers} to {spared}: engines compute {now.busy:.0%}, the trainer never waits"
    return Advice(replace(setting, workers=spared), reason, replace(memory, settling=True, plenty=0))


def _try(lever: Lever, changed: Setting, because: str, now: Measured, setting: Setting, memory: Memory) -> Advice:
    size = abs(getattr(changed, lever) / getattr(setting, lever) - 1)
    trial = Trial(lever, setting, now.finished, now.finished * (1 + GAIN * size))
    told = f"{_told(setting, changed)}: {because}"
    return Advice(changed, told, replace(memory, trial=trial, settling=True))


def _told(before: Setting, after: Setting) -> str:
    names: tuple[Lever, ...] = ("concurrency", "workers", "tickets")
    moved = [name for name in names if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"{name} {getattr(before, name)} to {getattr(after, name)}" for name in moved)


def _clip(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
