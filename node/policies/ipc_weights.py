"""Weights that a trainer lends to an engine on its own device, without a copy.

Passed are CUDA's handles of the trainer's memory or, on the CPU, names of shared memory into which
its weights are moved. The engine copies from there and lets go. The trainer must not step until
then, and a loan serves one load.

The handles go through the version's directory, which this user alone writes, as a pickle of which
nothing is made but tensors."""

import pickle  # noqa: TID251 - see `_Tensors`
from contextlib import suppress
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing import reductions

from node.policies.rounding import to_bfloat16
from node.policies.weight_diff import kinds_of
from swarm.texts import first_line

if TYPE_CHECKING:  # an engine borrows without what a policy needs
    from node.policies.policy import Policy

LENT: Final = "lent.pickle"
_KINDS: Final = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # as files of weights name them


class _Tensors(pickle.Unpickler):
    """Makes tensors where others have them, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == reductions.__name__ and name.startswith("rebuild_"):
            return super().find_class(module, name)
        if module in ("torch", "torch.storage"):
            found = super().find_class(module, name)
            if isinstance(found, (type, torch.dtype)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")


class NotLent(Exception):
    """Lent tensors cannot be borrowed. The files beside them hold the same."""


class Lender:
    """Lends the weights of one policy, version after version."""

    def __init__(self, policy: "Policy") -> None:
        self._policy = policy
        # Each telling of a CUDA tensor leaves something with it that only its end takes away, and
        # its handles are good for as long as it stays where it is. A name of shared memory is gone
        # with the first who has borrowed by it.
        self._keeps = policy.device.type == "cuda"
        self._handles = b""
        self._told: dict[str, int] = {}  # where they were then
        self._rounded: dict[str, torch.Tensor] = {}  # copies, where the files are rounded

    def lend(self, directory: Path) -> str | None:
        """Lend the weights that an export has just written into a directory. Returns why not, where
        the policy does not hold them as the files do or the device does not share its memory."""
        policy = self._policy
        if policy.adapter is not None:
            return "in the files the adapter is merged"
        held = {name: each.detach() for name, each in policy.model.state_dict().items()}
        written = kinds_of(directory)
        self.forget()
        self._rounded = {
            name: to_bfloat16(held[name])
            for name, (kind, _) in written.items()
            if kind == _KINDS[torch.bfloat16] and name in held
        }
        held |= self._rounded
        kinds = {name: (_KINDS.get(each.dtype), tuple(each.shape)) for name, each in held.items()}
        for name, kind in written.items():
            if kinds.get(name) != kind:
                return f"the trainer does not hold {name} as its files do"
        try:
            self._tell({name: held[name] for name in written})
            line = f"{_place(policy.device)}\n".encode()
            (directory / LENT).write_bytes(line + self._handles)
        except (RuntimeError, OSError) as error:  # of drivers and allocators, or a full disk
            return f"this device does not share its memory ({first_line(error)})"
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)  # the last step, which wrote them
        return None

    def forget(self) -> None:
        """Free the copies of the last loan, once the engine has loaded them."""
        if self._rounded:
            self._rounded, self._told = {}, {}

    def _tell(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._keeps and self._told == _places(tensors):
            return
        if self._policy.device.type == "cpu":  # by name: the engine is no child of this process
            torch.multiprocessing.set_sharing_strategy("file_system")
        buffer = BytesIO()
        ForkingPickler(buffer).dump(tensors)
        self._handles = buffer.getvalue()
        self._told = _places(tensors)


def _places(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def borrow(directory: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors that were lent, by name, where they lie in the trainer.

    Raises:
        NotLent: nothing was lent here, or not on this device, or its owner is gone.
    """
    try:
        with (directory / LENT).open("rb") as file:
            place = file.readline().decode(errors="replace").rstrip()
            if place != _place(device):
                raise NotLent(f"the trainer is on {place}, the engine on {_place(device)}")
            tensors: dict[str, torch.Tensor] = _Tensors(file).load()
    except FileNotFoundError as error:
        raise NotLent(f"there is no {error.filename}") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise NotLent(f"{type(error).__name__}: {first_line(error)}") from error
    return tensors


def let_go(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Forget what was borrowed, once all that reads it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    tensors.clear()
    if device.type == "cuda":
        with suppress(RuntimeError):  # the owner may be gone
            torch.cuda.ipc_collect()


def _place(device: torch.device) -> str:
    """A device's name on this machine, and its number in this process, which handles hold."""
    if device.type != "cuda":
        return device.type
    number = torch.cuda.current_device() if device.index is None else device.index
    return f"GPU {torch.cuda.get_device_properties(number).uuid} as number {number}"
