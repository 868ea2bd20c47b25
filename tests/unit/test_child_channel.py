"""A child's frames: what breaks them ends the child, and no answer goes to another request."""

import os
import signal
import subprocess
from collections.abc import Awaitable, Callable

import pytest
import trio

from node.system import child_process
from node.system.child_process import INLINE_BYTES_MAX, NUMBER, ChildChannel, encode
from swarm.errors import ChildFailed, LocalProtocolError
from tests.support import run

GRACE_S = 10.0


def with_child(body: Callable[[ChildChannel], Awaitable[None]]) -> None:
    async def main() -> None:
        channel = await ChildChannel.start("test", "tests.unit.channel_child", subprocess.DEVNULL)
        try:
            await body(channel)
        finally:
            await channel.close(GRACE_S)

    run(main)


async def send(channel: ChildChannel, how: str = "well", text: str = "x") -> None:
    await channel.send(encode({NUMBER: channel.next_number, "how": how, "text": text}))


def test_texts_of_any_kind_and_length_come_back_and_the_child_ends_with_its_input() -> None:
    async def body(channel: ChildChannel) -> None:
        for text in ("", "\ud800", "é" * INLINE_BYTES_MAX):
            await send(channel, text=text)
            assert (await channel.answer())["ok"] == text
        await channel.close(GRACE_S)
        assert channel.process.returncode == 0

    with_child(body)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("large", "bytes announced"),
        ("noise", "the test process"),
        ("list", "no map"),
        ("nameless", "no number"),
    ],
)
def test_what_is_no_frame_ends_the_child(how: str, why: str) -> None:
    async def body(channel: ChildChannel) -> None:
        await send(channel, how)
        with pytest.raises(ChildFailed, match=why):
            await channel.answer()
        await channel.process.wait()
        assert channel.process.returncode == -signal.SIGKILL

    with_child(body)


def test_an_answer_that_was_left_behind_goes_to_nobody() -> None:
    async def body(channel: ChildChannel) -> None:
        await send(channel, text="first")
        with trio.move_on_after(0):
            await channel.answer()
        await send(channel, text="second")
        assert (await channel.answer())["ok"] == "second"
        await send(channel, "late", "third")
        assert (await channel.answer())["ok"] == "third"
        await send(channel)
        await channel.settle()
        await send(channel, text="fifth")
        assert (await channel.answer())["ok"] == "fifth"

    with_child(body)


def test_a_child_that_ends_is_told_with_how_it_ended() -> None:
    async def body(channel: ChildChannel) -> None:
        await send(channel, "half")
        with pytest.raises(ChildFailed, match=r"the test process ended \(status 0\)"):
            await channel.answer()
        with pytest.raises(ChildFailed, match="status 0"):
            await send(channel)

    with_child(body)

    async def killed(channel: ChildChannel) -> None:
        os.kill(channel.process.pid, signal.SIGKILL)
        with pytest.raises(ChildFailed, match="killed by signal 9"):
            await channel.answer()

    with_child(killed)


def test_half_a_request_ends_the_child() -> None:
    async def body(channel: ChildChannel) -> None:
        os.kill(channel.process.pid, signal.SIGSTOP)
        with trio.move_on_after(0.1) as scope:
            await send(channel, text="x" * 2**24)
        assert scope.cancelled_caught
        await channel.process.wait()
        assert channel.process.returncode == -signal.SIGKILL

    with_child(body)


def test_a_frame_over_the_limit_is_our_own_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "FRAME_BYTES_MAX", 10)
    with pytest.raises(LocalProtocolError, match="a frame of"):
        encode({"text": "x" * 10})
