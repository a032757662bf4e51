"""What a vLLM worker process is given (`--worker-extension-cls`) so that it computes with the weights it was told to.

Imported by vLLM, not by us: needs nothing of this package, so that it loads where only vLLM is installed. Loads a
folder by vLLM's own reload, then mends what that leaves wrong; remembers which version it loaded. A worker process that
begins anew remembers none. Does not prove anything: that is done from outside, with log-probabilities.
"""

from typing import Any


class Extension:
    """Mixed into vLLM's worker class; methods are called by `/collective_rpc`, on every worker."""

    contraflow_held = ""

    def contraflow_load(self: Any, folder: str, stamp: str) -> dict[str, Any]:
        """Load the weights of `folder` and be stamped `stamp`. What it loaded is counted, for whoever asks."""
        self.contraflow_held = f"a version that was not loaded whole ({stamp})"
        self.reload_weights(weights_path=folder)
        packed = _pack(self.model_runner.get_model())
        self.contraflow_held = stamp
        return {"stamp": stamp, "packed": packed}

    def contraflow_stamp(self: Any) -> dict[str, Any]:
        """What this worker holds, and what it is."""
        import vllm

        return {"stamp": self.contraflow_held, "vllm": vllm.__version__}


def _pack(model: Any) -> int:
    """Pack the experts of a CPU model as its kernels want them, which vLLM does at first load and not at a reload.

    Gives the number of layers that were packed. Seen in vLLM 0.32: without this, a reload answers 200 and computes
    wrong log-probabilities.
    """
    if next(model.parameters()).device.type != "cpu":
        return 0
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import cpu_prepack_moe_weight

    layers = [module for module in model.modules() if type(module).__name__ == "RoutedExperts"]
    for layer in layers:
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(cpu_prepack_moe_weight(weight.data, "vec"))
    return len(layers)
