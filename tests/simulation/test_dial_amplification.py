"""What others can make a node dial: a victim's door hears of us no more than now and then."""

from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import Any

import pytest
import trio

from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.identity import Identity, PeerId
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.dht import Dht, key_of
from swarm.peers.discovery import Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.base import ServeLimits
from swarm.wire import codec
from swarm.wire.messages import (
    CLOSER_PER_REPLY_MAX,
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    KNOWN_PEERS_MAX,
    PROVIDERS_BYTES_MAX,
    PROVIDERS_PER_REPLY_MAX,
    PROVIDERS_PROTOCOL,
    PROVIDERS_REPLY_BYTES_MAX,
    HelloReply,
    KnownPeer,
    ProvidersReply,
)

LAN = LinkProfile(latency_s=0.02)
RUN_ID = "sums-1"
LIARS = 4
VICTIM = LIARS + 1
ATTACK_S = 300
DIALS_MAX = 8  # within the attack: once, and again after 10, 20, 40, 80 ... seconds


def simulate(hosts: int, body: Callable[[SimulatedWorld, trio.Nursery], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with open_world(1, hosts, LAN) as world, trio.open_nursery() as nursery:
            result = await body(world, nursery)
            nursery.cancel_scope.cancel()
            return result

    return deterministic_run(main, seed=1)


def dials_at(world: SimulatedWorld, host: int) -> list[float]:
    """When a host was dialled, from now on."""
    times: list[float] = []
    number, dial = world.network._numbers[world.peer_id(host)], world.network._dial

    async def counted(source: Any, to: int, peer: PeerId) -> None:
        if to == number:
            times.append(trio.current_time())
        await dial(source, to, peer)

    world.network._dial = counted  # type: ignore[method-assign]
    return times


class Liar:
    """A member that places ever new peers at one address, which it spells in ever other ways."""

    def __init__(self, world: SimulatedWorld, host: int, target: int) -> None:
        self.transport = world.join(host)
        self._rng = Random(host)
        self._number = world.network._numbers[world.peer_id(target)]
        self._spelling = count()
        self.transport.serve(
            HELLO_PROTOCOL, self.greet, ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX)
        )
        self.transport.serve(
            PROVIDERS_PROTOCOL, self.provide,
            ServeLimits(PROVIDERS_BYTES_MAX, PROVIDERS_REPLY_BYTES_MAX),
        )  # fmt: skip

    def named(self, number: int) -> tuple[KnownPeer, ...]:
        found = []
        for _ in range(number):
            peer = Identity(self._rng.randbytes(32)).peer_id
            zeros = (f"{self._number:0{1 + next(self._spelling) % 9}}" for _ in range(2))
            addresses = tuple(f"/memory/{each}/p2p/{peer}" for each in zeros)
            found.append(KnownPeer(peer_id=peer, addresses=addresses))
        return tuple(found)

    async def greet(self, peer: PeerId, payload: bytes) -> bytes:
        return codec.encode(
            HelloReply(
                type="hello_reply", packages=(), run_id=RUN_ID, agent="test", other_hello=None,
                known_peers=self.named(KNOWN_PEERS_MAX), addresses=self.transport.addresses(),
            )
        )  # fmt: skip

    async def provide(self, peer: PeerId, payload: bytes) -> bytes:
        reply = ProvidersReply(
            type="providers",
            providers=self.named(PROVIDERS_PER_REPLY_MAX),
            closer=self.named(CLOSER_PER_REPLY_MAX),
        )
        return codec.encode(reply)


def member(
    world: SimulatedWorld,
    host: int,
    bootstrap: tuple[str, ...],
    nursery: trio.Nursery,
    *,
    dht: bool = False,
) -> Discovery:
    transport = world.join(host)
    gater = ConnectionGater(transport, Ledger())
    discovery = Discovery(
        NodeInfo(RUN_ID, "test", world.identities[host], bytes([host]) * 16),
        bootstrap,
        AddressBook(),
        gater,
        now_s=lambda: EPOCH_S + trio.current_time(),
        rng=world.rng(f"discovery/{host}"),
        run_sync=run_inline,
    )
    nursery.start_soon(discovery.run)
    if dht:
        table = Dht(
            key_of(RUN_ID),
            gater,
            bootstrap,
            lambda peer, where: discovery.learn_found(peer, where, by="the hash table"),
            lambda: True,
            rng=world.rng(f"dht/{host}"),
        )
        nursery.start_soon(table.run)
    return discovery


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "drops"])
@pytest.mark.parametrize("dht", [False, True], ids=["hello", "hello and table"])
def test_four_liars_make_nobody_a_flood(answers: bool, dht: bool) -> None:
    """A victim that answers has another key than those named; one that drops never answers."""

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> list[float]:
        world.network.address(world.peer_id(VICTIM))
        if answers:
            world.join(VICTIM)
        times = dials_at(world, VICTIM)
        liars = [Liar(world, host, VICTIM) for host in range(LIARS)]
        where = tuple(each.transport.addresses()[0] for each in liars)
        member(world, LIARS, where, nursery, dht=dht)
        await trio.sleep(ATTACK_S)
        return times

    times = simulate(VICTIM + 1, body)
    busiest = max((sum(0 <= other - at < 1 for other in times) for at in times), default=0)
    assert 1 <= len(times) <= DIALS_MAX
    assert busiest == 1


def test_who_comes_ever_anew_and_says_that_it_is_elsewhere_brings_no_flood() -> None:
    """Whoever connected was a peer that worked, and its own word on where it is was an address
    that worked: each new key was dialled there once it had left."""
    strangers = range(VICTIM + 1, VICTIM + 61)

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> list[float]:
        world.join(VICTIM)
        times = dials_at(world, VICTIM)
        own = member(world, 0, (), nursery)
        honest = world.join(1)
        await honest.connect(own._transport.addresses()[0])

        async def come(host: int) -> None:
            stranger = world.join(host)
            claimed = f"/memory/{world.network._numbers[world.peer_id(VICTIM)]}/p2p/"

            async def greet(peer: PeerId, payload: bytes) -> bytes:
                return codec.encode(
                    HelloReply(
                        type="hello_reply", packages=(),
                        run_id=RUN_ID, agent="test", known_peers=(),
                        addresses=(f"{claimed}{stranger.peer_id}",), other_hello=None,
                    )
                )  # fmt: skip

            stranger.serve(HELLO_PROTOCOL, greet, ServeLimits(HELLO_BYTES_MAX, 65_536))
            await stranger.connect(own._transport.addresses()[0])
            await trio.sleep(3.0)
            await stranger.disconnect(own._transport.peer_id)

        for host in strangers:
            await come(host)
            await trio.sleep(2.0)
        return times

    times = simulate(VICTIM + 61, body)
    assert 1 <= len(times) <= DIALS_MAX


def test_an_honest_peer_at_whose_place_liars_name_others_is_found_again_when_it_restarts() -> None:
    """Each of the liars' dials fails, for the honest peer answers by another key."""

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> float:
        friend = VICTIM
        async with trio.open_nursery() as first_life:
            member(world, friend, (), first_life)
            liars = [Liar(world, host, friend) for host in range(LIARS)]
            where = tuple(each.transport.addresses()[0] for each in liars)
            own = member(
                world, LIARS, (*where, world.network.address(world.peer_id(friend))), nursery
            )
            await trio.sleep(60)
            assert world.peer_id(friend) in own.peers
            own._bootstrap = ()  # the address book must do
            first_life.cancel_scope.cancel()
        world.crash(friend)
        await trio.sleep(240)
        member(world, friend, (), nursery)
        began = trio.current_time()
        with trio.fail_after(400):
            while world.peer_id(friend) not in own.peers:  # noqa: ASYNC110
                await trio.sleep(0.5)
        return trio.current_time() - began

    took_s = simulate(VICTIM + 1, body)
    assert took_s <= 180  # half of a pause of 320 s, on average
