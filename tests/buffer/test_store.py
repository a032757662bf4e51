"""One case each of what can happen to a group; test_laws.py has all of them in any order."""

from collections.abc import Callable

import pytest

from contraflow.buffer.accounts import Accounts
from contraflow.buffer.ledger import Event, Kind
from contraflow.buffer.opening import Opening
from contraflow.buffer.store import Store
from contraflow.config import Buffer
from contraflow.errors import EngineError, LedgerError
from contraflow.types import Chosen, Group, Ticket, Version

MakeGroup = Callable[..., Group]
NOTHING = Accounts(
    line=3, cut=0, posed=0, waiting=0, running=0, ready=0, taken=0, trained=0, final=0, dropped={}, reposed={},
    refused={}, superseded=0,
)  # fmt: skip
V0, V1 = Version(3, 0), Version(3, 1)


def new_store(events: list[Event] | None = None, **section: object) -> Store:
    """Line 3, step 0, P = 2 and eta = 1 unless said otherwise."""
    log = [] if events is None else events
    buffer = Buffer.model_validate({"groups_per_step": 2, "max_age": 1} | section)
    return Store(buffer, Opening(line=3, step=0), NOTHING, log.append)


def pose(store: Store, count: int = 1) -> list[Ticket]:
    tickets = [store.pose() for _ in range(count)]
    assert None not in tickets
    return [ticket for ticket in tickets if ticket is not None]


def test_a_group_lives_from_posed_to_trained_and_each_change_is_an_event(make_group: MakeGroup) -> None:
    events: list[Event] = []
    store = new_store(events, groups_per_step=1)
    (ticket,) = pose(store)
    store.start(0, 1, V0)
    store.put(make_group(ticket))
    take = store.choose(0)
    assert take is not None
    assert take.groups == (Chosen(0, 1, V0),)
    assert store.fetch(take.groups) == store.fetch(take.groups)
    store.finish(0, V1)
    assert [event.kind for event in events] == [Kind.POSED, Kind.STARTED, Kind.READY, Kind.TAKEN, Kind.TRAINED]
    assert (events[3].step, events[3].version) == (0, V0)
    assert (store.counts().trained, store.counts().tickets_busy) == (1, 1)
    store.serve(V1)
    assert store.counts().tickets_busy == 0


def test_no_signal_is_dropped_for_good_and_its_ticket_comes_home_at_once(make_group: MakeGroup) -> None:
    store = new_store()
    store.put(make_group(pose(store)[0], rewards=(1.0, 1.0)))
    counts = store.counts()
    assert (counts.dropped, counts.waiting, counts.tickets_busy) == ({"no_signal": 1}, 0, 0)
    assert pose(store)[0].group == 1


def test_no_signal_looks_only_at_episodes_that_did_not_fail(make_group: MakeGroup) -> None:
    store = new_store()
    store.put(make_group(pose(store)[0], rewards=(1.0, 0.0), errors=("", "env")))
    assert store.counts().dropped == {"no_signal": 1}


def test_no_signal_is_kept_when_the_recipe_says_so(make_group: MakeGroup) -> None:
    store = new_store(no_signal="keep")
    store.put(make_group(pose(store)[0], rewards=(1.0, 1.0)))
    assert store.counts().ready == 1


@pytest.mark.parametrize("case", [{"errors": ("env", "env")}, {"versions": ()}, {"rewards": (), "errors": ()}])
@pytest.mark.parametrize("no_signal", ["drop", "keep"])
def test_a_group_without_a_usable_episode_is_dropped(make_group: MakeGroup, case: dict, no_signal: str) -> None:  # type: ignore[type-arg]
    store = new_store(no_signal=no_signal)
    store.put(make_group(pose(store)[0], **case))
    assert (store.counts().dropped, store.counts().tickets_busy) == ({"no_episodes": 1}, 0)


def test_a_lost_group_is_posed_again_before_fresh_ones_as_the_next_attempt(make_group: MakeGroup) -> None:
    store = new_store()
    first, second = pose(store, 2)
    store.lose(second.group, second.attempt, "worker rollout-1 died")
    store.lose(first.group, first.attempt, "deadline")
    assert store.counts().reposed == {"lost": 2}
    assert pose(store, 3) == [Ticket(group=g, attempt=a, line=3) for g, a in ((0, 2), (1, 2), (2, 1))]


def test_a_group_given_up_for_good_is_dropped_with_its_reason_and_its_ticket_comes_home() -> None:
    store = new_store()
    (ticket,) = pose(store)
    store.drop(ticket.group, ticket.attempt, "overdue")
    store.drop(ticket.group, ticket.attempt, "overdue")
    counts = store.counts()
    assert (counts.dropped, counts.refused, counts.tickets_busy) == ({"overdue": 1}, {"late": 1}, 0)
    assert pose(store)[0].group == ticket.group + 1


@pytest.mark.parametrize("report", ["twice", "older attempt", "unknown", "after lost"])
def test_a_late_report_is_refused_and_counted_and_nothing_else(make_group: MakeGroup, report: str) -> None:
    store = new_store()
    (ticket,) = pose(store)
    if report == "twice":
        store.put(make_group(ticket))
    elif report == "older attempt":
        store.lose(0, 1, "deadline")
        pose(store)
    elif report == "unknown":
        ticket = Ticket(group=99, attempt=1, line=3)
    else:
        store.lose(0, 1, "deadline")
    before = store.counts()
    store.put(make_group(ticket))
    store.lose(ticket.group, ticket.attempt, "late")
    store.start(ticket.group, ticket.attempt, V0)
    after = store.counts()
    assert after.refused == {"late": 3}
    assert (after.ready, after.running, after.waiting) == (before.ready, before.running, before.waiting)


def test_a_group_of_a_dead_line_is_refused_by_its_ticket_and_posed_again_by_its_tokens(make_group: MakeGroup) -> None:
    store = new_store()
    (ticket,) = pose(store)
    store.put(make_group(Ticket(group=0, attempt=1, line=2)))
    assert (store.counts().refused, store.counts().running) == ({"dead_line": 1}, 1)
    store.put(make_group(ticket, line=2))
    assert (store.counts().reposed, store.counts().waiting) == ({"dead_line": 1}, 1)


def test_an_engine_that_lags_gets_no_group_and_the_ticket_stays_good(make_group: MakeGroup) -> None:
    store = new_store()
    store.step = 1
    store.serve(V1)
    (ticket,) = pose(store)
    for stale in (V0, Version(2, 7)):
        with pytest.raises(EngineError, match=r"version 2\.7|version 3\.0.*3\.1 was already served"):
            store.start(0, 1, stale)
    store.start(0, 1, V1)
    store.put(make_group(ticket, [1]))
    assert store.counts().ready == 1


def test_tokens_older_than_the_start_are_not_believed(make_group: MakeGroup) -> None:
    store = new_store()
    store.step = 1
    store.serve(V1)
    store.put(make_group(pose(store)[0], [0, 1]))
    assert store.counts().reposed == {"older_than_start": 1}


def test_tokens_of_a_version_that_cannot_be_yet_are_an_error(make_group: MakeGroup) -> None:
    store = new_store()
    with pytest.raises(LedgerError, match=r"tokens of 3\.1; 3\.0 is the newest"):
        store.put(make_group(pose(store)[0], [1]))


def test_masking_tells_the_trainer_the_floor_and_gives_up_what_lies_below_it(make_group: MakeGroup) -> None:
    store = new_store(expiry="mask", groups_per_step=1, max_age=1)
    slow, quick = pose(store, 2)
    for step in (0, 1):
        store.put(make_group(quick, [step]))
        assert store.choose(step) is not None
        store.finish(step, Version(3, step + 1))
        store.serve(Version(3, step + 1))
        (quick,) = pose(store)
    store.put(make_group(slow, [0, 1]))
    take = store.choose(2)
    assert take is not None
    assert take.groups == (Chosen(slow.group, 1, V1),)


def test_reposing_gives_up_a_running_group_and_refuses_it_when_it_comes_after_all(make_group: MakeGroup) -> None:
    store = new_store(expiry="repose", groups_per_step=1, max_age=0)
    (slow,) = pose(store)
    store.step = 1
    assert store.choose(1) is None
    assert store.counts().reposed == {"expired": 1}
    store.put(make_group(slow))
    assert store.counts().refused == {"late": 1}
    assert pose(store) == [Ticket(group=0, attempt=2, line=3)]


def test_a_ready_group_is_as_old_as_its_tokens_not_as_its_start(make_group: MakeGroup) -> None:
    store = new_store(expiry="repose", groups_per_step=1, max_age=0)
    (ticket,) = pose(store)
    store.start(0, 1, V0)
    store.step = 1  # version 1 was published, and its engine refreshed before the first token
    store.put(make_group(ticket, [1]))
    assert store.choose(1) is not None


def test_a_step_out_of_order_is_an_error(make_group: MakeGroup) -> None:
    store = new_store(groups_per_step=1)
    for wrong in (1, -1):
        with pytest.raises(LedgerError, match="the next is step 0"):
            store.choose(wrong)
    with pytest.raises(LedgerError, match="it was not taken"):
        store.finish(0, V1)
    store.put(make_group(pose(store)[0]))
    store.choose(0)
    with pytest.raises(LedgerError, match="step 0 is taken and not trained yet"):
        store.choose(1)
    with pytest.raises(LedgerError, match="said to publish"):
        store.finish(0, Version(3, 2))
    with pytest.raises(LedgerError, match="trained up to 0"):
        store.check_cut(1)
    store.finish(0, V1)
    store.finish(0, V1)
    store.check_cut(1)
    for never in (Version(3, 2), Version(2, 1)):
        with pytest.raises(LedgerError, match="cannot be served"):
            store.serve(never)


def test_only_what_is_taken_can_be_fetched(make_group: MakeGroup) -> None:
    store = new_store(groups_per_step=1)
    store.put(make_group(pose(store)[0]))
    with pytest.raises(LedgerError, match="attempt 1 of group 0 is not taken"):
        store.fetch([Chosen(0, 1, V0)])
    store.choose(0)
    with pytest.raises(LedgerError, match="attempt 2 of group 0 is not taken"):
        store.fetch([Chosen(0, 2, V0)])
    assert [group.ticket.group for group in store.fetch([Chosen(0, 1, V0)])] == [0]


def test_what_is_waited_for_is_said_in_full(make_group: MakeGroup) -> None:
    store = new_store(groups_per_step=2, max_age=1)
    tickets = pose(store, 4)
    assert store.pose() is None
    assert store.why_no_ticket() == (
        "a free ticket: 4 in all, 4 with running groups, 0 with ready ones, 0 with steps whose version no engine serves"
        " (newest served: 3.0)"
    )
    store.put(make_group(tickets[0]))
    assert store.why_no_take() == (
        "1 more group for step 0"
        " (running: 1, 2, 3; ready: 1; to be posed again: 0; tickets free: 0; newest served: 3.0)"
    )
    store.put(make_group(tickets[1]))
    store.choose(0)
    store.finish(0, V1)
    store.serve(V1)
    fresh = pose(store, 2)
    for ticket in fresh:
        store.put(make_group(ticket, [1]))
    assert store.choose(1) is None
    assert "2 more groups of version <= 3.0 for step 1 (running: 2, 3; ready: 2;" in store.why_no_take()
    assert store.counts().oldest_age == 1


def test_a_long_list_of_running_groups_is_cut_short() -> None:
    store = new_store(groups_per_step=30, max_age=0)
    pose(store, 30)
    assert (
        "running: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 10 more;"
        in store.why_no_take()
    )
