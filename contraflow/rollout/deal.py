"""Which rank of an engine computes a request: the one with the least to do, and a group's requests together.

Pure bookkeeping. Requests of a group share a prompt, so they share its prefill where they meet; a later turn of an
episode finds its past where the earlier one was.
"""

from contraflow.types import Request

_GROUPS = 4096  # groups remembered after their last request


class Dealer:
    """Invariant: `load[r]` is the sum of the tokens that rank r's requests in flight may come to hold."""

    def __init__(self, ranks: int) -> None:
        self.load = [0] * ranks
        self._homes: dict[str, int] = {}  # group -> rank, last used last

    def deal(self, request: Request) -> int:
        """The rank for a request, which is in flight there until `done`."""
        group = request.group
        rank = self._homes.pop(group, None) if group else None
        if rank is None:
            rank = min(range(len(self.load)), key=self.load.__getitem__)
        if group:
            self._homes[group] = rank
            if len(self._homes) > _GROUPS:
                del self._homes[next(iter(self._homes))]
        self.load[rank] += _tokens(request)
        return rank

    def done(self, request: Request, rank: int) -> None:
        """The request is in flight no more."""
        self.load[rank] -= _tokens(request)


def _tokens(request: Request) -> int:
    return len(request.prompt) + request.max_new_tokens
