"""A child process and message frames over its pipes."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import msgpack
import trio
import trio.abc

from node.system.child_environment import child_environ
from swarm.errors import ChildFailed, LocalProtocolError

FRAME_BYTES_MAX = 256 * 2**20
INLINE_BYTES_MAX = 65_536  # larger answers are decoded in a thread
END_TIMEOUT_S = 10.0  # for the exit after the pipes closed
HEADER = struct.Struct(">I")
NUMBER = "number"
_RECEIVE_BYTES = 262_144


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode one frame.

    Raises:
        LocalProtocolError: over `FRAME_BYTES_MAX`, or not encodable.
    """
    try:
        body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    except (OverflowError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"no message to or from a child process: {error}") from None
    if len(body) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"a frame of {len(body)} bytes to or from a child process")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    message = msgpack.unpackb(body, strict_map_key=True, unicode_errors="surrogatepass")
    if not isinstance(message, dict):
        raise LocalProtocolError("a frame of a child process holds no map")
    return message


def body_length(header: bytes, bytes_max: int = FRAME_BYTES_MAX) -> int:
    """Length in a header.

    Raises:
        LocalProtocolError: over the limit; something else wrote into the pipe.
    """
    length: int = HEADER.unpack(header)[0]
    if length > bytes_max:
        raise LocalProtocolError(f"a frame of {length} bytes announced")
    return length


async def start_child(
    words: Sequence[str],
    stderr: BinaryIO | int | None = None,
    environ: Mapping[str, str] | None = None,
) -> trio.Process:
    """Start `python` with these words, and pipes for its input and output. `environ` None:
    `child_environ()`."""
    return await trio.lowlevel.open_process(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=child_environ() if environ is None else environ,
        start_new_session=True,  # the node handles Ctrl-C and kills the whole group
    )


async def end_with_input(
    process: trio.Process, grace_s: float, kill: Callable[[], None] | None = None
) -> None:
    """End a child by closing its input; kill it after `grace_s`. The waiting is not cancellable."""
    assert process.stdin is not None
    assert process.stdout is not None
    with trio.CancelScope(shield=True):
        await process.stdin.aclose()
        with trio.move_on_after(grace_s):
            await process.wait()
        if process.returncode is None:
            (kill or process.kill)()
            await process.wait()
        await process.stdout.aclose()


class ChildChannel:
    """A child process with frames, for one task at a time.

    After a cancelled request, `settle` drops its answer. A request that was cut off while being
    written ends the child.
    """

    def __init__(self, name: str, process: trio.Process, bytes_max: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._name = name
        self._bytes_max = bytes_max
        self._stdin, self._stdout = process.stdin, process.stdout
        self._buffer = bytearray()
        self._sent = 0  # number of the last request
        self._answered = 0  # number of the last one answered in full

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        stderr: BinaryIO | int,
        environ: Mapping[str, str] | None = None,
        bytes_max: int = FRAME_BYTES_MAX,
    ) -> "ChildChannel":
        """Start `python -m module`.

        Args:
            name: kind of the child, for messages.
            environ: as of `start_child`.
            bytes_max: largest frame of the child.
        """
        return cls(name, await start_child(["-m", module], stderr, environ), bytes_max)

    @property
    def next_number(self) -> int:
        return self._sent + 1

    async def send(self, frame: bytes) -> None:
        """Write the request `next_number`.

        Raises:
            ChildFailed: the child ended.
        """
        whole = False
        try:
            await self._stdin.send_all(frame)
            whole = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ChildFailed(await self.obituary()) from None
        finally:
            if not whole:
                self.kill()
        self._sent += 1

    async def settle(self) -> None:
        """Wait for all outstanding answers and drop them.

        Raises:
            ChildFailed: the child ended, or broke the framing.
        """
        while self._answered < self._sent:
            await self._next_answer()

    async def answer(self) -> dict[str, Any]:
        """The answer to the last request.

        Raises:
            ChildFailed: as `settle`.
        """
        while (answer := await self._next_answer())[NUMBER] != self._sent:
            pass
        return answer

    async def _next_answer(self) -> dict[str, Any]:
        try:
            message = await self._receive()
        except (LocalProtocolError, ValueError) as error:  # MessagePack raises ValueError
            self.kill()
            raise ChildFailed(f"the {self._name} process: {error}") from None
        self._answered = message[NUMBER]
        return message

    async def _receive(self) -> dict[str, Any]:
        """Cancelling loses no bytes: they leave the buffer when the frame is complete."""
        await self._fill(HEADER.size)
        end = HEADER.size + body_length(bytes(self._buffer[: HEADER.size]), self._bytes_max)
        await self._fill(end)
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        if len(body) <= INLINE_BYTES_MAX:
            message = decode(body)
        else:
            with trio.CancelScope(shield=True):  # the bytes have left the buffer: finish
                message = await trio.to_thread.run_sync(decode, body)
        if not isinstance(message.get(NUMBER), int):
            raise LocalProtocolError("an answer has no number")
        return message

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            try:
                part = await self._stdout.receive_some(_RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                part = b""
            if not part:
                raise ChildFailed(await self.obituary())
            self._buffer += part

    async def obituary(self) -> str:
        """One line on how the child ended. Waits for it; its pipes are closed."""
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            await self.process.wait()
        self.kill()
        code = self.process.returncode
        killed = f"killed by signal {-code}" if code is not None and code < 0 else f"status {code}"
        return f"the {self._name} process ended ({killed})"

    def kill(self) -> None:
        if self.process.returncode is None:  # its id is not reused yet
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self, grace_s: float) -> None:
        """Close the child's input; kill its group after the grace time."""
        await end_with_input(self.process, grace_s, self.kill)
