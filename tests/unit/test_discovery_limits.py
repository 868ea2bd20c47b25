"""What strangers may cost a node's membership: bytes, time and places in its address book."""

from collections.abc import Awaitable, Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import trio
from pydantic import ValidationError

from node.simulated import EPOCH_S
from swarm import codec, discovery
from swarm.discovery import AddressBook, Discovery
from swarm.errors import RemoteProtocolError
from swarm.identity import Identity, PeerId
from swarm.ledger import Ledger
from swarm.messages import (
    ADDRESS_CHARS_MAX,
    ADDRESSES_MAX,
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    KNOWN_PEERS_MAX,
    Hello,
    HelloReply,
    KnownPeer,
)
from swarm.simulation.determinism import deterministic_run
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import World, open_world
from swarm.transport.base import ServeLimits

LAN = LinkProfile(latency_s=0.02)
RUN_ID = "sums-1"


def simulate(hosts: int, body: Callable[[World, trio.Nursery], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with open_world(1, hosts, LAN) as world, trio.open_nursery() as nursery:
            result = await body(world, nursery)
            nursery.cancel_scope.cancel()
            return result

    return deterministic_run(main, seed=1)


def hello(addresses: tuple[str, ...]) -> Hello:
    return Hello(
        type="hello", run_id=RUN_ID, instance=bytes(16), started_at_s=EPOCH_S,
        sent_at_s=EPOCH_S, agent="test", addresses=addresses,
    )  # fmt: skip


def long_addresses(peer: str, *, number: int = 10**6) -> tuple[str, ...]:
    end = f"/p2p/{peer}"
    return tuple(
        f"/memory/{number + i}/".ljust(ADDRESS_CHARS_MAX - len(end), "x") + end
        for i in range(ADDRESSES_MAX)
    )


def member(world: World, host: int, bootstrap: tuple[str, ...] = ()) -> Discovery:
    return Discovery(
        RUN_ID, "test", world.identities[host], bytes([host]) * 16, world.join(host), bootstrap,
        AddressBook(), Ledger(), now_s=lambda: EPOCH_S + trio.current_time(),
        rng=world.rng(f"discovery/{host}"),
    )  # fmt: skip


# --- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["/dns4/\N{SNOWMAN}/tcp/1", "/ip4/1.2.3.4 /tcp/1", "/a\n", ""])
def test_an_address_is_printable_ascii(address: str) -> None:
    with pytest.raises(ValidationError):
        hello((address,))


def test_a_hello_with_other_addresses_is_the_peers_fault() -> None:
    own = Identity(b"a" * 32)
    body = hello(()).model_copy(update={"addresses": ("\N{GRINNING FACE}" * 256,)})
    with pytest.raises(RemoteProtocolError):
        codec.decode_hello(codec.sign_hello(body, own))


@pytest.mark.parametrize("limit", [HELLO_REPLY_BYTES_MAX, 20_000])
def test_no_legal_hellos_bring_our_reply_over_our_own_limit(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second limit stands for peers that find more to say than they can today."""
    monkeypatch.setattr(discovery, "HELLO_REPLY_BYTES_MAX", limit)

    async def body(world: World, nursery: trio.Nursery) -> None:
        own = member(world, 0)
        nursery.start_soon(own.run)
        await trio.sleep(0.1)
        replies = []
        for host in range(1, KNOWN_PEERS_MAX + 3):
            guest = world.join(host)
            await guest.connect(own._transport.addresses()[0])
            record = codec.sign_hello(hello(long_addresses(guest.peer_id)), world.identities[host])
            answer = await guest.request(
                own._transport.peer_id, HELLO_PROTOCOL, record,
                timeout_s=5, response_bytes_max=HELLO_REPLY_BYTES_MAX,
            )  # fmt: skip
            assert len(answer) <= limit
            replies.append(codec.decode(answer, HelloReply, limit))
        assert replies[-1].known_peers

    simulate(KNOWN_PEERS_MAX + 3, body)
