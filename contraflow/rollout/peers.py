"""What the ranks of one engine settle among themselves, seen from one of them; and the engine that has no other rank.

Every MoE layer is an exchange between ranks, so all of them run the same forward passes, with zero tokens if need be.
`gang.py` holds the form that asks others.
"""

from typing import Protocol

from contraflow.errors import CarrierError
from contraflow.types import Int32


class Peers(Protocol):
    """Collective: every rank of the engine makes the same calls in the same order, step by step."""

    def passes(self, prefill: bool, decode: bool) -> tuple[bool, bool]:
        """Which passes any rank has tokens for, when this one has them or not: all run those, and no others."""
        ...

    def sampled(self, sampled_2B: Int32) -> Int32:
        """The tokens (and bits of their log-probabilities) that all ranks of the same sequences go on with."""
        ...

    def consent(self, fault: CarrierError | None) -> None:
        """Raise CarrierError unless no rank has a fault."""
        ...


class Alone:
    """An engine of one rank: nothing to settle."""

    def passes(self, prefill: bool, decode: bool) -> tuple[bool, bool]:
        """See `Peers`."""
        return prefill, decode

    def sampled(self, sampled_2B: Int32) -> Int32:
        """See `Peers`."""
        return sampled_2B

    def consent(self, fault: CarrierError | None) -> None:
        """See `Peers`."""
        if fault is not None:
            raise fault
