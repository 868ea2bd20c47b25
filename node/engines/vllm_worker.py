"""What the node adds to vLLM's worker: loading weights from a directory, in place.

vLLM mixes the class into its worker (`--worker-extension-cls`); it runs in vLLM's process alone.
"""

from typing import Any


class ReloadExtension:
    """One method for `/collective_rpc`. The worker provides the rest of `self`."""

    def reload_directory(self: Any, directory: str) -> None:
        """Replace the weights by those of a model directory with the same shapes.

        On CPUs a layer may multiply with a packed copy of its weight. A head that is tied to the
        embedding is loaded through the embedding, which leaves the head's copy as it was: pack
        every copy again whose weight is still there.
        """
        self.reload_weights(weights_path=directory)
        for layer in self.model_runner.get_model().modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
