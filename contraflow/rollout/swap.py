"""New weights into a live decoder: checked, copied in place, proven, or rolled back.

Takes tensors by name and a probe. The storage of the weights never moves. Knows nothing of requests or the KV cache.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from contraflow.errors import CarrierError
from contraflow.model.decoder import Decoder
from contraflow.types import Probe
from contraflow.weights.probe import check_probe, probe_logprobs


class LiveWeights:
    """Invariant: outside `load` the decoder holds the tensors of the last `load` that succeeded (before the first: its
    own). Those tensors are kept by reference, not copied, as what a failed `load` rolls back to."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._live: dict[str, Tensor] = dict(decoder.state_dict())  # aliases of the parameters' storage
        self._loaded: Mapping[str, Tensor] | None = None

    def load(self, tensors: Mapping[str, Tensor], probe: Probe) -> None:
        """Make the decoder compute with `tensors`, and prove it.

        Raises: CarrierError before anything is touched if names or shapes differ; CarrierError if the proof fails,
        after what was there before is back.
        """
        self._check(tensors)
        previous = self._loaded
        if previous is None:  # only once: nobody else holds the weights that the decoder came with
            previous = {name: tensor.clone() for name, tensor in self._live.items()}
        try:
            self._copy(tensors)
            check_probe(probe, probe_logprobs(self._decoder, probe.prompts))
        except BaseException:
            self._copy(previous)
            raise
        self._loaded = tensors

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        missing, surplus = self._live.keys() - tensors.keys(), tensors.keys() - self._live.keys()
        if missing or surplus:
            raise CarrierError(
                f"the version does not fit the model: missing {sorted(missing) or 'none'}, "
                f"not of this model {sorted(surplus) or 'none'}"
            )
        for name, live in self._live.items():
            if tensors[name].shape != live.shape:
                raise CarrierError(
                    f"tensor {name!r} has shape {list(tensors[name].shape)}, the model's is {list(live.shape)}"
                )

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, live in self._live.items():
            live.copy_(tensors[name], non_blocking=True)
