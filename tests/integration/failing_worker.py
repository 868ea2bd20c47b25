"""A vLLM worker that goes wrong in a load, where a file in the directory of weights says so."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from node.engines.vllm.worker import ReloadExtension

FORGET, CORRUPT, DIE, FAIL = "forget", "corrupt", "die", "fail"
FORGET_EXPERTS, HANG, HANGS = "forget-experts", "hang", "hangs"
HOLD, WAITS = "hold", "waits"  # see `holding_worker`, which is imported by vLLM's process alone


@contextmanager
def _experts_left(model: Any, they_are: bool) -> Iterator[None]:
    """As vLLM itself does with experts: they are packed with their first weights alone."""
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    experts = [each for each in methods if getattr(each, "packs_at_each_load", False)]
    packing = [each.process_weights_after_loading for each in experts]
    for method in experts if they_are else ():
        method.process_weights_after_loading = partial(
            type(method).process_weights_after_loading, method
        )
    yield
    for method, pack in zip(experts, packing, strict=True):
        method.process_weights_after_loading = pack


class FailingExtension(ReloadExtension):
    """Loads as the real one does, but for its fault."""

    def reload_directory(
        self: Any, directory: str, names: Sequence[str] | None = None, lent: bool = False
    ) -> dict[str, str]:
        known = (FORGET, FORGET_EXPERTS, CORRUPT, DIE, FAIL, HANG)
        fault = {each for each in known if (Path(directory) / each).exists()}
        if FAIL in fault:
            raise RuntimeError("no memory for it")
        if fault & {DIE, HANG}:
            some = (names or [])[:3]
            super().reload_directory(directory, some, lent)
        if HANG in fault:
            (Path(directory) / HANGS).touch()
            signal.pause()
        if DIE in fault:
            os.kill(os.getpid(), signal.SIGKILL)
        head = self.model_runner.get_model().lm_head
        packed = head.cpu_linear
        with _experts_left(self.model_runner.get_model(), FORGET_EXPERTS in fault):
            answer = super().reload_directory(directory, names, lent)
        if FORGET in fault:  # as vLLM itself does with a head that is tied to the embedding
            head.cpu_linear = packed
        if CORRUPT in fault:
            norm = self.model_runner.get_model().model.norm.weight
            with torch.no_grad():
                norm[0] *= 1.5
        return answer
