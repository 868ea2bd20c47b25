"""The ranks of one trainer keep together: rank 0 gives orders, the others follow.

Orders stand in torchrun's store, because a learner may wait for groups for hours and collective
operations would time out. Large bodies go by broadcast. Rank 0 leaves a sign of life beside them,
so that nobody waits for a trainer that is gone."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from node.system.child_process import HEADER, decode, encode
from node.train.ranks import Ranks
from swarm.errors import ChildFailed
from swarm.texts import first_line

OPEN_TIMEOUT_S: Final = 120.0  # for the store to answer, and for all ranks to have come
OPERATION_TIMEOUT_S: Final = 600.0  # in which a rank has to take part in what the others do
BEAT_S: Final = 1.0  # from one sign of life of rank 0 to the next
LOOKS_PER_BEAT: Final = 20  # whether rank 0 told something
SILENCE_S_MAX: Final = 120.0  # without one, once there was one: rank 0 is gone
LEAVING_SILENCE_S_MAX: Final = 5.0  # the same for who was asked to leave
_PREFIX: Final = "swarm-trainer"
_BEAT, _STOP = "beat", "stop"

if TYPE_CHECKING:

    class _Store(PrefixStore):
        """The methods of a store that torch's stub lacks."""

        def clone(self) -> "_Store": ...

        def set(self, key: str, value: str | bytes) -> None: ...


class Team:
    """This rank's end. `tell` and the iterator of `orders` are used by one thread."""

    def __init__(self, ranks: Ranks) -> None:
        """Reach the store.

        Raises:
            ChildFailed: nothing answers there.
        """
        self.ranks = ranks
        timeout = timedelta(seconds=OPEN_TIMEOUT_S)
        try:
            meeting = rendezvous("env://", ranks.rank, ranks.size, timeout=timeout)
            store, _, _ = next(iter(meeting))
        except (RuntimeError, ValueError) as error:
            raise ChildFailed(f"torchrun's store does not answer: {line_of(error)}") from error
        # Of attempts before, torchrun's store still holds what their ranks were told.
        self._store = cast("_Store", PrefixStore(f"{_PREFIX}/{ranks.attempt}", store))
        self._orders = 0  # told or taken so far

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks are here. On `device` they will compute.

        Raises:
            ChildFailed: not all came.
        """
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            distributed.init_process_group(
                backend,
                store=PrefixStore("group", self._store),
                rank=self.ranks.rank,
                world_size=self.ranks.size,
                timeout=timedelta(seconds=OPERATION_TIMEOUT_S),
            )
        except RuntimeError as error:
            raise ChildFailed(
                f"not all of {self.ranks.size} ranks came within {OPEN_TIMEOUT_S:.0f} s: "
                f"{line_of(error)}"
            ) from error

    # --- rank 0 ----------------------------------------------------------------------------

    def live(self) -> None:
        """Give signs of life from now on, until this process ends."""
        store = self._store.clone()

        def beat() -> None:
            while True:
                store.add(_BEAT, 1)
                time.sleep(BEAT_S)  # noqa: TID251 - a thread of its own

        threading.Thread(target=beat, daemon=True).start()

    def stopper(self) -> Callable[[], None]:
        """A function that ends the other ranks, from any thread."""
        store = self._store.clone()
        return lambda: store.set(_STOP, "1")

    def tell(self, op: str, body: bytes = b"", **arguments: Any) -> None:
        """Have the other ranks do this; `body`, of any size, once all have met."""
        order = {"op": op, "body_bytes": len(body), **arguments}
        self._store.set(self._key(self._orders), encode(order))
        if self._orders:  # everybody took part in the one before, so everybody has read it
            self._store.delete_key(self._key(self._orders - 1))
        self._orders += 1
        if body:
            column = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            distributed.broadcast(column, 0)

    # --- the other ranks -------------------------------------------------------------------

    def orders(self, is_leaving: Callable[[], bool]) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The orders of rank 0, with their bodies, until it ends, or until this rank was asked to
        leave and rank 0 is not at work.

        Raises:
            ChildFailed: rank 0 is gone.
        """
        while self._wait_for_order(is_leaving):
            frame = self._store.get(self._key(self._orders))
            self._orders += 1
            order = decode(bytes(frame)[HEADER.size :])
            column = torch.empty(order.pop("body_bytes"), dtype=torch.uint8)
            if column.numel():
                distributed.broadcast(column, 0)
            yield order, column.numpy().tobytes()

    def stopped(self) -> bool:
        """True if rank 0 has ended, as far as one can find out now."""
        try:
            return bool(self._store.check([_STOP]))
        except RuntimeError:  # the store is gone as well
            return False

    def _wait_for_order(self, is_leaving: Callable[[], bool]) -> bool:
        beats, silent_s = 0, 0.0
        while True:
            try:  # asked again and again: a wait in the store logs each time that it takes too long
                for _ in range(LOOKS_PER_BEAT):
                    if self._store.check([self._key(self._orders)]):
                        return True
                    time.sleep(BEAT_S / LOOKS_PER_BEAT)  # noqa: TID251 - no event loop here
                if self.stopped():
                    return False
                now = self._store.add(_BEAT, 0)
            except RuntimeError as error:
                raise ChildFailed(f"torchrun's store is gone: {line_of(error)}") from error
            silent_s = 0.0 if now != beats else silent_s + BEAT_S
            beats = now
            if is_leaving() and (beats == 0 or silent_s >= LEAVING_SILENCE_S_MAX):
                return False
            if beats and silent_s >= SILENCE_S_MAX:
                raise ChildFailed(f"the trainer of rank 0 has been silent for {silent_s:.0f} s")

    def _key(self, number: int) -> str:
        return f"order/{number}"


def line_of(error: BaseException) -> str:
    """The first sentence of a message of torch, without the place in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", first_line(error, 1_000)).split(". ")[0][:200]
