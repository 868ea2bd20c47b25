"""The extension of vLLM's worker that loads weights in place, from a directory or from a trainer on
the same device. It runs in vLLM's process alone (`--worker-extension-cls`)."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.interfaces.quantisation import in_int8

_WARNS_OF_LAYERS_LEFT_ALONE = "vllm.model_executor.model_loader.reload"
_INT8_SCHEME = "CompressedTensorsW8A8Int8"


class ReloadExtension:
    """One method for `/collective_rpc`. The worker provides the rest of `self`."""

    def reload_directory(
        self: Any, directory: str, names: Sequence[str] | None = None, lent: bool = False
    ) -> dict[str, str]:
        """Load the tensors of a model directory with the same shapes; `names` selects some, whole
        layers only. `lent` tensors come from the trainer's memory; `not_lent` in the answer says
        why they were read from files.

        On CPUs a layer may multiply with a packed copy of its weight, which vLLM does not renew in
        two cases. A head tied to the embedding loads through the embedding, so every copy is packed
        again. Experts are packed at their first load alone, so each load is made to look like the
        first.
        """
        model = self.model_runner.get_model()
        layers = list(model.modules())
        if self.device.type == "cpu":
            for layer in layers:
                _pack_experts_at_each_load(getattr(layer, "quant_method", None))
        wanted = None if names is None else frozenset(names)
        answer: dict[str, str] = {}
        if wanted is None or wanted:
            source = _source(Path(directory), wanted, lent, self.device, answer)
            with _quiet(), source as tensors, _int8_layers(model) as quantised:
                self.reload_weights(weights_iterator=in_int8(tensors, quantised))
        for layer in layers:
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
        return answer


def _pack_experts_at_each_load(method: Any) -> None:
    """Change a layer of experts, whose kernel packs their weights when it is made."""
    if getattr(method, "moe_kernel", None) is None or hasattr(method, "packs_at_each_load"):
        return
    pack = method.process_weights_after_loading

    def pack_anew(layer: Any) -> None:
        method.moe_kernel = None
        pack(layer)

    method.process_weights_after_loading = pack_anew
    method.packs_at_each_load = True


@contextmanager
def _source(
    directory: Path,
    wanted: frozenset[str] | None,
    lent: bool,
    device: Any,
    answer: dict[str, str],
) -> Iterator[Iterator[tuple[str, Any]]]:
    """The tensors by name. Borrowed ones are released at the end of the block."""
    from node.policies import ipc_weights  # here, not in the node: it brings torch in

    borrowed: dict[str, Any] = {}
    if lent:
        try:
            borrowed = ipc_weights.borrow(directory, device)
        except ipc_weights.NotLent as why:
            answer["not_lent"] = str(why)
    if not borrowed:
        yield _tensors(directory, wanted)
        return
    try:
        yield (each for each in borrowed.items() if wanted is None or each[0] in wanted)
    finally:
        ipc_weights.let_go(borrowed, device)


@contextmanager
def _int8_layers(model: Any) -> Iterator[frozenset[str]]:
    """The last parts of the names of int8 layers, to be loaded within the block.

    On CPUs only the kernel has such a layer's weight. vLLM's reload removes the layer's empty
    parameter, which the kernel reads, and frees the scales that the kernel points to.
    """
    found = [
        (name.rpartition(".")[2], layer)
        for name, layer in model.named_modules()
        if type(getattr(layer, "scheme", None)).__name__ == _INT8_SCHEME
    ]
    for _, layer in found:
        _hold_scales(layer.scheme.kernel)
    packed = getattr(model, "packed_modules_mapping", {})
    yield frozenset(part for name, _ in found for part in packed.get(name, [name]))
    for _, layer in found:
        if not hasattr(layer, "weight"):
            layer.register_parameter("weight", None)


def _hold_scales(kernel: Any) -> None:
    """Have a kernel keep a reference to its scales."""
    if hasattr(kernel, "holds_scales"):
        return
    make = kernel.process_weights_after_loading

    def make_and_hold(layer: Any) -> None:
        make(layer)
        kernel.held_scales = layer.weight_scale

    kernel.process_weights_after_loading = make_and_hold
    kernel.holds_scales = True


def _tensors(directory: Path, wanted: frozenset[str] | None) -> Iterator[tuple[str, Any]]:
    """The tensors of a model directory by name, one at a time."""
    from safetensors import safe_open  # here, not in the node: it brings torch in

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if wanted is None or name in wanted:
                    yield name, file.get_tensor(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence vLLM's warnings of layers that a delta does not hold."""
    loggers = [
        logger
        for name, logger in logging.Logger.manager.loggerDict.items()
        if name.startswith(_WARNS_OF_LAYERS_LEFT_ALONE) and isinstance(logger, logging.Logger)
    ]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
