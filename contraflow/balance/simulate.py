"""A run on simulated time: the window, the tickets and the policy as they are, workers and trainer as a few numbers.

Takes a `Plant` and a setting, gives what each look measured and what the policy did. Thousands of workers take seconds,
because an engine's sequences share it evenly and are counted, not stepped. Not modelled: length of contexts, prefill,
who has which prefix; what refreshes move is a pause.

An engine gives each of its n sequences `min(speed, rate / n)` tokens a second. All of them advance alike, so one number
an engine, the tokens that a sequence present since the beginning would have, says when each ends (processor sharing;
Kleinrock 1967).
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from contraflow.balance.policy import Bounds, Measured, Memory, Setting, steer
from contraflow.buffer.tickets import Tickets
from contraflow.buffer.window import Window

MOST_EVENTS = 200_000_000  # then something goes round in circles


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Two pools and a task, in numbers. Times in seconds."""

    speed: float  # tokens a second of one sequence alone
    rate: float  # tokens a second of one engine, all sequences together
    train_s: float  # a step
    refresh_s: float = 0.0  # an engine stands still for a version
    start_s: float = 0.0  # from the decision to a new worker's first version
    episodes: int = 8  # of a group
    turns: int = 1
    tokens: float = 512.0  # of a turn, in the mean
    spread: float = 0.0  # of their logarithm (log-normal); 0: all are alike
    longest: float = float("inf")  # tokens at which a turn is cut off
    env_s: float = 0.0  # an environment's answer after each turn
    kv_sequences: int = 0  # that an engine holds; more are played again from the start. 0: any number


Change = Callable[[Plant], Plant]


@dataclass(frozen=True)
class Look:
    """What one look saw, and what was decided on it."""

    at_s: float
    measured: Measured
    setting: Setting
    reason: str
    steps: int


@dataclass
class _Group:
    """An attempt at a group. `newest` is no token's but the start's: simulated engines change version for nobody."""

    group: int
    oldest: int
    newest: int
    left: int  # episodes that are not done


@dataclass
class _Engine:
    """One worker. `gone` tokens each of its sequences has been given so far, as of `since`."""

    number: int
    since: float
    free_from: float = 0.0  # it stands still until then
    gone: float = 0.0
    active: list[tuple[float, int, _Group, int]] = field(default_factory=list)  # ends at, tie, group, turns left
    groups: int = 0
    version: int = -1
    busy: float = 0.0
    leaving: bool = False
    epoch: int = 0  # of its next end: older ones in the queue mean nothing

    def pace(self, plant: Plant) -> float:
        """Tokens a second of each sequence."""
        return min(plant.speed, plant.rate / len(self.active)) if self.active else 0.0

    def advance(self, now: float, plant: Plant) -> None:
        """Bring `gone` up to `now`."""
        began = max(self.since, min(self.free_from, now))
        if self.active and now > began:
            self.gone += (now - began) * self.pace(plant)
            self.busy += (now - began) * min(1.0, len(self.active) * plant.speed / plant.rate)
        self.since = now


class Simulation:
    """Runs to a time. Belongs to one caller; the same seed gives the same run.

    Invariants: those of `Tickets` and `Window`; an engine begins a group only under the newest version served.
    """

    def __init__(
        self, plant: Plant, window: Window, setting: Setting, bounds: Bounds, *, seed: int, look_s: float, steered: bool
    ) -> None:
        """`look_s`: seconds from look to look. `steered`: whether the policy moves the setting."""
        self.plant, self.window, self.setting, self.bounds = plant, window, setting, bounds
        self.look_s, self.steered, self.time_s = look_s, steered, 0.0
        self.looks: list[Look] = []
        self.steps = 0
        self.oldest_age = 0
        self._draws = np.random.default_rng(seed)
        self._lengths: Iterator[float] = iter(())
        self._memory = Memory()
        self._tickets = Tickets(bounds.tickets, served=0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = self._groups = 0
        self._engines: list[_Engine] = []
        self._running: dict[int, _Group] = {}
        self._ready: dict[int, _Group] = {}
        self._training = False
        self._waited_since = 0.0
        self._waited = self._played = 0.0
        self._noted = 0.0
        self._finished = self._preempted = 0
        for _ in range(setting.workers):
            self._hire(0.0)

    def run(self, until_s: float, changes: dict[float, Change] | None = None) -> list[Look]:
        """Go on until `until_s`; at each time of `changes`, the plant becomes what it gives."""
        for at, change in (changes or {}).items():
            self._at(at, partial(self._become, change))
        self._at(self.time_s + self.look_s, self._look)
        for _ in range(MOST_EVENTS):
            if not self._events or self._events[0][0] > until_s:
                break
            self.time_s, _, happen = heapq.heappop(self._events)
            happen()
        self.time_s = until_s
        return self.looks

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._ties += 1
        heapq.heappush(self._events, (when, self._ties, happen))

    def _become(self, change: Change) -> None:
        for engine in self._engines:
            engine.advance(self.time_s, self.plant)
        self.plant, self._lengths = change(self.plant), iter(())
        for engine in self._engines:
            self._next_end(engine)

    def _hire(self, delay: float) -> None:
        engine = _Engine(len(self._engines), self.time_s)
        self._engines.append(engine)
        self._at(self.time_s + delay, partial(self._serve, engine))

    def _serve(self, engine: _Engine) -> None:
        """The engine has proved the newest version: it serves it after its pause."""
        engine.advance(self.time_s, self.plant)
        engine.version = self.steps
        self._tickets.serve(self.steps)
        self._ask()

    def _ask(self) -> None:
        """Give out tickets while there are tickets, places and engines with the newest version served."""
        fresh = [one for one in self._engines if one.version == self._tickets.served and not one.leaving]
        queue = deque(sorted(fresh, key=lambda one: one.groups))
        while queue and self._tickets.free - (self.bounds.tickets - self.setting.tickets) > 0:
            engine = queue.popleft()
            if engine.groups < self.setting.concurrency:
                self._begin(engine)
                queue.append(engine)

    def _begin(self, engine: _Engine) -> None:
        self._note()
        self._tickets.issue()
        self._groups += 1
        group = _Group(self._groups, engine.version, engine.version, self.plant.episodes)
        self._running[group.group] = group
        engine.groups += 1
        engine.advance(self.time_s, self.plant)
        for _ in range(self.plant.episodes):
            self._turn(engine, group, self.plant.turns)
        self._next_end(engine)

    def _turn(self, engine: _Engine, group: _Group, turns: int) -> None:
        """One more sequence on the engine, which is up to date."""
        self._ties += 1
        length = self._length()
        if self.plant.kv_sequences and len(engine.active) >= self.plant.kv_sequences:
            self._preempted += 1
            length *= 2  # it, or another in its place, is given up half way and begun again
        heapq.heappush(engine.active, (engine.gone + length, self._ties, group, turns))

    def _length(self) -> float:
        found = next(self._lengths, None)
        if found is None:
            spread, mean = self.plant.spread, self.plant.tokens
            drawn = self._draws.normal(-spread * spread / 2, spread, 4096) if spread else np.zeros(4096)
            self._lengths = iter(np.minimum(mean * np.exp(drawn), self.plant.longest).tolist())
            found = next(self._lengths)
        return found

    def _next_end(self, engine: _Engine) -> None:
        engine.epoch += 1
        if engine.active:
            left = max(engine.active[0][0] - engine.gone, 0.0)
            when = max(self.time_s, engine.free_from) + left / engine.pace(self.plant)
            self._at(when, partial(self._end, engine, engine.epoch))

    def _end(self, engine: _Engine, epoch: int) -> None:
        """A sequence of the engine has all its tokens."""
        if epoch != engine.epoch:
            return
        engine.advance(self.time_s, self.plant)
        ends, _, group, turns = heapq.heappop(engine.active)
        engine.gone = max(engine.gone, ends)
        if self.plant.env_s:
            self._at(self.time_s + self.plant.env_s, partial(self._answered, engine, group, turns))
        else:
            self._answered(engine, group, turns)
        self._next_end(engine)

    def _answered(self, engine: _Engine, group: _Group, turns: int) -> None:
        """The environment has answered a turn."""
        if turns > 1:
            engine.advance(self.time_s, self.plant)
            self._turn(engine, group, turns - 1)
            self._next_end(engine)
            return
        group.left -= 1
        if group.left:
            return
        self._note()
        engine.groups -= 1
        if self._running.pop(group.group, None):  # else it expired, and its ticket is home
            self._ready[group.group] = group
            self._finished += 1
            self._take()
        self._ask()

    def _take(self) -> None:
        if self._training or len(self._ready) < self.window.groups_per_step:
            return
        decision = self.window.decide(self.steps, self._ready.values(), self._running.values())
        for lost in decision.expired:
            self._ready.pop(lost, None)
            self._running.pop(lost, None)
            self._tickets.home()
        if not decision.chosen:
            return
        taken = [self._ready.pop(group) for group in decision.chosen]
        self.oldest_age = max(self.oldest_age, *(self.steps - one.oldest for one in taken))
        self._tickets.spend(self.steps, len(taken))
        self._waited += self.time_s - self._waited_since
        self._training = True
        self._at(self.time_s + self.plant.train_s, self._trained)

    def _trained(self) -> None:
        self.steps += 1
        self._training, self._waited_since = False, self.time_s
        for engine in self._engines:
            if engine.version >= 0 and not engine.leaving:
                engine.advance(self.time_s, self.plant)
                engine.free_from = self.time_s + self.plant.refresh_s
                self._next_end(engine)
                self._at(engine.free_from, partial(self._serve, engine))
        self._take()

    def _note(self) -> None:
        """Groups being played change: what was until now is counted."""
        self._played += len(self._running) * (self.time_s - self._noted)
        self._noted = self.time_s

    def _look(self) -> None:
        measured = self._measure()
        reason = ""
        if self.steered:
            advice = steer(measured, self.setting, self.bounds, self._memory)
            reason, self._memory = advice.reason, advice.memory
            self._apply(advice.setting)
        self.looks.append(Look(self.time_s, measured, self.setting, reason, self.steps))
        self._at(self.time_s + self.look_s, self._look)

    def _measure(self) -> Measured:
        self._note()
        serving = [engine for engine in self._engines if engine.version >= 0 and not engine.leaving]
        for engine in serving:
            engine.advance(self.time_s, self.plant)
        waiting = 0.0 if self._training else self.time_s - self._waited_since
        held = max((len(one.active) for one in serving), default=0) / (self.plant.kv_sequences or np.inf)
        measured = Measured(
            finished=self._finished / self.look_s,
            waits=min(1.0, (self._waited + waiting) / self.look_s),
            busy=sum(one.busy for one in serving) / (len(serving) * self.look_s) if serving else 0.0,
            playing=self._played / self.look_s,
            free=self._tickets.free - (self.bounds.tickets - self.setting.tickets),
            kv_held=held,
            preempted=self._preempted,
            serving=len(serving),
        )
        for engine in self._engines:
            engine.busy = 0.0
        self._waited = self._played = 0.0
        self._finished = self._preempted = 0
        self._waited_since = self.time_s
        return measured

    def _apply(self, setting: Setting) -> None:
        kept = [engine for engine in self._engines if not engine.leaving]
        for engine in kept[setting.workers :]:
            engine.leaving = True  # it finishes what it plays, and begins nothing
        for _ in range(setting.workers - len(kept)):
            self._hire(self.plant.start_s)
        self.setting = replace(setting)
        self._ask()


def groups_a_second(looks: list[Look], after_s: float = 0.0) -> float:
    """The mean over the looks after a time."""
    counted = [look.measured.finished for look in looks if look.at_s > after_s]
    return sum(counted) / len(counted)
