"""A private swarm on real sockets: what somebody without the key gets, which is nothing."""

from functools import partial

import pytest
import trio
from libp2p.utils import encode_delim

from swarm.errors import PeerUnreachable
from swarm.identity import Identity
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
KEY = b"k" * 32
GREETING = encode_delim(b"/multistream/1.0.0")
NOISE = encode_delim(b"/noise")


async def plain_noise(node: Libp2pTransport) -> bytes:
    """All that a node says to a first message of plain Noise, after the choice of protocol."""
    port = int(node.addresses()[0].split("/")[4])
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(GREETING + NOISE)
        got = b""
        while len(got) < len(GREETING + NOISE):
            got += await stream.receive_some(1000)
        assert got == GREETING + NOISE
        await stream.send_all((32).to_bytes(2, "big") + b"\x09" * 32)
        got = b""
        with trio.fail_after(5):  # it hangs up, well before its time limit
            while part := await _receive(stream):
                got += part
                if len(got) > 34:
                    break
        return got


async def _receive(stream: trio.SocketStream) -> bytes:
    try:
        return bytes(await stream.receive_some(1000))
    except trio.BrokenResourceError:
        return b""


def test_a_stranger_with_plain_noise_is_told_nothing() -> None:
    async def main() -> None:
        async with open_libp2p(Identity(b"a" * 32), LOOPBACK, network_key=KEY) as node:
            for _ in range(5):
                assert await plain_noise(node) == b""
            assert node.peers() == ()
        async with open_libp2p(Identity(b"a" * 32), LOOPBACK) as open_node:
            assert len(await plain_noise(open_node)) > 34, "an open node answers: the test can fail"

    run(main)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_listener_with_garbage_for_a_handshake_is_unreachable(key: bytes | None) -> None:
    async def garbage(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(GREETING + NOISE + (96).to_bytes(2, "big") + b"\x09" * 96)
            await _receive(stream)
            await trio.sleep(1)

    async def main() -> None:
        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK, network_key=key) as node,
            trio.open_nursery() as nursery,
        ):
            listeners = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), garbage, 0)
            port = listeners[0].socket.getsockname()[1]
            peer = Identity(b"b" * 32).peer_id
            with pytest.raises(PeerUnreachable) as info:
                await node.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")
            assert "\n" not in str(info.value)
            nursery.cancel_scope.cancel()

    run(main)


def test_who_dials_a_private_swarm_by_its_address_is_told_what_it_takes() -> None:
    async def main() -> None:
        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK, network_key=KEY) as private,
            open_libp2p(Identity(b"b" * 32), LOOPBACK) as stranger,
        ):
            with pytest.raises(PeerUnreachable, match="a private swarm takes an invitation"):
                await stranger.connect(private.addresses()[0])

    run(main)
