"""Tickets come home by the version that is served, and are never more than there are."""

import pytest

from contraflow.buffer.tickets import Tickets
from contraflow.errors import LedgerError


def test_a_ticket_of_a_step_comes_home_with_the_version_that_the_step_published() -> None:
    tickets = Tickets(4, served=0)
    for _ in range(4):
        tickets.issue()
    tickets.spend(0, 2)
    tickets.serve(0)
    assert (tickets.free, tickets.held, tickets.spent) == (0, 2, 2)
    tickets.serve(1)
    assert (tickets.free, tickets.held, tickets.spent) == (2, 2, 0)


def test_a_served_version_that_skips_some_brings_all_their_tickets_home() -> None:
    tickets = Tickets(3, served=5)
    for step in (5, 6, 7):
        tickets.issue()
        tickets.spend(step, 1)
    tickets.serve(7)
    assert (tickets.free, tickets.spent) == (2, 1)


def test_the_served_version_never_falls() -> None:
    tickets = Tickets(1, served=0)
    tickets.serve(3)
    tickets.serve(2)
    assert tickets.served == 3


def test_a_dropped_group_gives_its_ticket_back_at_once() -> None:
    tickets = Tickets(1, served=0)
    tickets.issue()
    tickets.home()
    assert tickets.free == 1


def test_no_more_tickets_are_issued_than_there_are() -> None:
    tickets = Tickets(1, served=0)
    tickets.issue()
    with pytest.raises(LedgerError, match="all 1 tickets are out"):
        tickets.issue()
