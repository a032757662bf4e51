"""New weights into a live decoder: checked, copied in place, proven, or rolled back.

Takes tensors by name and a probe. The storage of the weights moves only when `rest` has given it away. Knows nothing
of requests or the KV cache.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from contraflow.errors import CarrierError
from contraflow.model.decoder import Decoder
from contraflow.types import Probe
from contraflow.weights.manifest import check_tensors
from contraflow.weights.probe import check_probe, probe_logprobs


class LiveWeights:
    """Invariant: outside `load` the decoder holds the tensors of the last `load` that succeeded (before the first: its
    own). Those tensors are kept by reference, not copied, as what a failed `load` rolls back to."""

    def __init__(self, decoder: Decoder, tables: Mapping[str, Tensor] | None = None) -> None:
        """`tables` is what else the decoder computes with, and changes with its weights: where its experts lie."""
        self._decoder = decoder
        self.live: dict[str, Tensor] = {**decoder.state_dict(), **(tables or {})}  # aliases of storage in use
        self._loaded: Mapping[str, Tensor] | None = None
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []  # while resting

    def load(self, tensors: Mapping[str, Tensor], probe: Probe, consent: Callable[[CarrierError | None], None]) -> None:
        """Make the decoder compute with `tensors`, and prove it. Collective over the ranks that share the model.

        `consent` is told what is wrong here, if anything, and raises CarrierError if any rank has something: all ranks
        load, or none. Raises: CarrierError before anything is touched if names or shapes differ; CarrierError if the
        proof fails, after what was there before is back.
        """
        consent(_fault_of(lambda: self._check(tensors)))
        previous = self._loaded
        if previous is None:  # only once: nobody else holds the weights that the decoder came with
            previous = {name: tensor.clone() for name, tensor in self.live.items()}
        try:
            self._copy(tensors)
            given = probe_logprobs(self._decoder, probe.prompts)
            consent(_fault_of(lambda: check_probe(probe, given)))
        except BaseException:
            self._copy(previous)
            raise
        self._loaded = tensors

    def rest(self) -> int:
        """Free the weights' memory until `wake`; gives the bytes freed. Nothing may compute meanwhile."""
        if self._loaded is None:  # only once, as in `load`
            self._loaded = {name: tensor.to("cpu", copy=True) for name, tensor in self.live.items()}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self.live.values()}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._sizes:
            storage.resize_(0)
        return sum(nbytes for _, nbytes in self._sizes)

    def wake(self) -> None:
        """Take memory again, elsewhere, and load what was there before `rest`."""
        for storage, nbytes in self._sizes:
            storage.resize_(nbytes)
        assert self._loaded is not None
        self._copy(self._loaded)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        check_tensors(tensors, {name: live.shape for name, live in self.live.items()}, "the version")

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, live in self.live.items():
            live.copy_(tensors[name], non_blocking=True)


def _fault_of(check: Callable[[], None]) -> CarrierError | None:
    try:
        check()
    except CarrierError as fault:
        return fault
    return None
