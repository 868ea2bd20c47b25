"""A child process of ours, and frames over its pipes.

A frame is four bytes of length, big-endian, and one MessagePack map. A request has a number, which
its answer repeats; a child answers in the order of the requests. Both ends are ours, but a child
may be at work on strangers' text: what it announces over the limit is not read.
"""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import msgpack
import trio
import trio.abc

from node.system.child_environment import child_environ
from swarm.errors import ChildFailed, LocalProtocolError

FRAME_BYTES_MAX = 256 * 2**20
INLINE_BYTES_MAX = 65_536  # an answer over this is decoded in a thread
END_TIMEOUT_S = 10.0  # for an end that its pipes have announced
HEADER = struct.Struct(">I")
NUMBER = "number"
_RECEIVE_BYTES = 262_144


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame.

    Raises:
        LocalProtocolError: it is over `FRAME_BYTES_MAX`, or holds what no frame can.
    """
    try:
        body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    except (OverflowError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"no message to or from a child process: {error}") from None
    if len(body) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"a frame of {len(body)} bytes to or from a child process")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The message in a frame without its header."""
    message = msgpack.unpackb(body, strict_map_key=True, unicode_errors="surrogatepass")
    if not isinstance(message, dict):
        raise LocalProtocolError("a frame of a child process holds no map")
    return message


def body_length(header: bytes, bytes_max: int = FRAME_BYTES_MAX) -> int:
    """The length that a header announces.

    Raises:
        LocalProtocolError: it is over the limit: something else wrote into the pipe.
    """
    length: int = HEADER.unpack(header)[0]
    if length > bytes_max:
        raise LocalProtocolError(f"a frame of {length} bytes announced")
    return length


async def end_with_input(process: trio.Process, grace_s: float) -> None:
    """End a child that ends when its input does, with pipes for input and output; kill it after
    `grace_s`. Whoever waits for it is not cancelled meanwhile."""
    assert process.stdin is not None
    assert process.stdout is not None
    with trio.CancelScope(shield=True):
        await process.stdin.aclose()
        with trio.move_on_after(grace_s):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await process.stdout.aclose()


class ChildChannel:
    """One child process and its frames. Not for use by two tasks at a time.

    Whoever is cancelled after a request was written leaves an answer behind; `settle` drops it. A
    request that could not be written whole ends the child.
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
            name: of the kind of child, for messages.
            environ: None is `child_environ()`.
            bytes_max: of a frame of the child's.
        """
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=child_environ() if environ is None else environ,
            start_new_session=True,  # Ctrl-C is the node's to handle; a group to be killed as one
        )
        return cls(name, process, bytes_max)

    @property
    def next_number(self) -> int:
        """The number of the request that is sent next."""
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
        """Wait for the answers to all requests, and drop them.

        Raises:
            ChildFailed: the child ended, or broke the framing, which ends it.
        """
        while self._answered < self._sent:
            await self._next_answer()

    async def answer(self) -> dict[str, Any]:
        """The answer to the last request.

        Raises:
            As `settle`.
        """
        while (answer := await self._next_answer())[NUMBER] != self._sent:
            pass
        return answer

    async def _next_answer(self) -> dict[str, Any]:
        try:
            message = await self._receive()
        except (LocalProtocolError, ValueError) as error:  # MessagePack's are ValueErrors
            self.kill()
            raise ChildFailed(f"the {self._name} process: {error}") from None
        self._answered = message[NUMBER]
        return message

    async def _receive(self) -> dict[str, Any]:
        """Cancelling loses no bytes: they are taken from the buffer when the frame is whole."""
        await self._fill(HEADER.size)
        end = HEADER.size + body_length(bytes(self._buffer[: HEADER.size]), self._bytes_max)
        await self._fill(end)
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        if len(body) <= INLINE_BYTES_MAX:
            message = decode(body)
        else:
            with trio.CancelScope(shield=True):  # the bytes are gone from the buffer: finish
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
        """One line on how the child ended; it is waited for, since its pipes are closed."""
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            await self.process.wait()
        self.kill()
        code = self.process.returncode
        killed = f"killed by signal {-code}" if code is not None and code < 0 else f"status {code}"
        return f"the {self._name} process ended ({killed})"

    def kill(self) -> None:
        """End the child and what it started, at once."""
        if self.process.returncode is None:  # its number is not somebody else's by now
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self, grace_s: float) -> None:
        """End the child: its input ends, then it is killed if it stays for longer than this."""
        with trio.CancelScope(shield=True):
            await self._stdin.aclose()
            with trio.move_on_after(grace_s):
                await self.process.wait()
            self.kill()
            await self.process.wait()
            await self._stdout.aclose()
