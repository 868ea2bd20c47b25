"""A vLLM worker that goes wrong in a load, where a file in the directory of weights says so."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from node.engines.vllm_worker import ReloadExtension

FORGET, CORRUPT, DIE, FAIL = "forget", "corrupt", "die", "fail"


class FailingExtension(ReloadExtension):
    """Loads as the real one does, but for its fault."""

    def reload_directory(self: Any, directory: str, names: Sequence[str] | None = None) -> None:
        fault = {each for each in (FORGET, CORRUPT, DIE, FAIL) if (Path(directory) / each).exists()}
        if FAIL in fault:
            raise RuntimeError("no memory for it")
        if DIE in fault:
            some = (names or [])[:3]
            super().reload_directory(directory, some)
            os.kill(os.getpid(), signal.SIGKILL)
        head = self.model_runner.get_model().lm_head
        packed = head.cpu_linear
        super().reload_directory(directory, names)
        if FORGET in fault:  # as vLLM itself does with a head that is tied to the embedding
            head.cpu_linear = packed
        if CORRUPT in fault:
            norm = self.model_runner.get_model().model.norm.weight
            with torch.no_grad():
                norm[0] *= 1.5
