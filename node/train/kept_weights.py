"""Another set of the trained weights, which a trainer keeps beside the present one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from node.interfaces.trainer import DamagedCheckpoint
from node.train.version_lag import swapped

_TOTAL: Final = "total"  # in a file, beside the weights by their number


class KeptWeights:
    """A copy of what is trained: as it was at some time, or averaged over updates."""

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._trained = list(trained)
        self._kept = [each.detach().clone() for each in trained]
        self._total = 1.0  # of the weights of an average's parts

    def restart(self) -> None:
        """Become the present weights."""
        for kept, now in zip(self._kept, self._trained, strict=True):
            kept.copy_(now.detach())
        self._total = 1.0

    def follow(self, decay: float) -> None:
        """Take the present weights into the average, in which an update counts `decay` of the next
        one. kept += (now - kept) / W, W = decay W + 1 (PPO-EWMA, arXiv 2110.00641)."""
        self._total = decay * self._total + 1.0
        for kept, now in zip(self._kept, self._trained, strict=True):
            kept.lerp_(now.detach(), 1.0 / self._total)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within it the model has these weights, and nothing may train it."""
        with swapped(self._trained, self._kept):
            yield

    def save(self, path: Path) -> None:
        tensors = {str(place): each.cpu().contiguous() for place, each in enumerate(self._kept)}
        save_file(tensors | {_TOTAL: torch.tensor(self._total, dtype=torch.float64)}, path)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; without a file become the present weights.

        Raises:
            DamagedCheckpoint: the file is damaged, or of another model.
        """
        if not path.exists():
            self.restart()
            return
        try:
            tensors = load_file(path)
            self._total = float(tensors[_TOTAL])
            for place, kept in enumerate(self._kept):
                kept.copy_(tensors[str(place)])
        except Exception as error:
            # boundary: damaged bytes raise anything from OSError to SafetensorError
            raise DamagedCheckpoint(f"checkpoint damaged: {path} does not load: {error}") from error
