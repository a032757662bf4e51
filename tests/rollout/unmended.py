"""A worker extension for a test: what ours would be if vLLM's own reload were enough."""

from typing import Any

from contraflow.rollout.vllm_extension import Extension


class Unmended(Extension):
    """Loads and stamps, and leaves experts as vLLM's reload leaves them."""

    def contraflow_load(self: Any, folder: str, stamp: str) -> dict[str, Any]:
        """See `Extension`."""
        self.reload_weights(weights_path=folder)
        self.contraflow_held = stamp
        return {"stamp": stamp}
