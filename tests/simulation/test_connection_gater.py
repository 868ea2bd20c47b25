"""What a ban and a quota mean on the network, over simulated links."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from swarm.errors import PeerUnreachable, Reject
from swarm.identity import PeerId
from swarm.limits.bounded_table import OriginLimits
from swarm.limits.quotas import RATES, RELAYED, RELAYED_SHARE, Kind
from swarm.peers.connection_gater import CONNECTION_LIMITS, ConnectionGater
from swarm.peers.reputation import BAN_S, Ban, Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.memory.network import MemoryTransport

LAN = LinkProfile(latency_s=0.01)
PUBLIC = "192.0.2."
HIDDEN = "behind a relay"  # no address, as far as anybody can see


class Guarded:
    """Host 0, with a gater on it."""

    def __init__(self, world: SimulatedWorld, limits: OriginLimits = CONNECTION_LIMITS) -> None:
        self.transport = world.join(0)
        self.ledger = Ledger()
        self.gater = ConnectionGater(self.transport, self.ledger, limits)
        self.told: list[Ban] = []
        self.gater.on_ban = self.hear

    async def hear(self, ban: Ban) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(ban)

    def lie(self, peer: PeerId, reason: Reject = Reject.MALFORMED, times: int = 3) -> None:
        for _ in range(times):
            self.ledger.reject(peer, reason)

    async def lets_in(self, transport: MemoryTransport) -> bool:
        """Whether a dial brings a connection that stays."""
        try:
            await transport.connect(self.transport.addresses()[0])
        except PeerUnreachable:
            return False
        await trio.sleep(0.5)
        return transport.peer_id in self.transport.peers()


def guarded(
    hosts: int,
    body: Callable[[SimulatedWorld, Guarded], Awaitable[Any]],
    limits: OriginLimits = CONNECTION_LIMITS,
) -> None:
    async def main() -> None:
        async with open_world(1, hosts, LAN) as world, trio.open_nursery() as nursery:
            guard = Guarded(world, limits)
            nursery.start_soon(guard.gater.run)
            await body(world, guard)
            nursery.cancel_scope.cancel()

    deterministic_run(main, seed=1)


def joined(world: SimulatedWorld, host: int, ip: str) -> MemoryTransport:
    return world.network.join(world.peer_id(host), ip)


def test_a_banned_peer_is_cut_off_and_let_in_again_when_its_time_is_up() -> None:
    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        liar, honest = world.join(1), world.join(2)
        assert await guard.lets_in(liar)
        assert await guard.lets_in(honest)
        guard.lie(liar.peer_id)
        await trio.sleep(0.1)
        assert guard.transport.peers() == (honest.peer_id,)
        assert guard.gater.is_banned(liar.peer_id)
        assert guard.gater.banned_peers() == {liar.peer_id}
        assert [(ban.subject, ban.why) for ban in guard.told] == [(liar.peer_id, "malformed 3")]
        assert not await guard.lets_in(liar)
        with pytest.raises(PeerUnreachable):  # nor does the guarded node dial it
            await guard.transport.connect(liar.addresses()[0])
        assert guard.gater.refused_connections["banned peer"] == 2
        await trio.sleep(BAN_S)
        assert not guard.gater.bans()
        assert await guard.lets_in(liar)

    guarded(3, body)


def test_nobody_bans_itself() -> None:
    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        guard.lie(guard.transport.peer_id, times=100)
        assert not guard.gater.bans()
        await trio.lowlevel.checkpoint()

    guarded(1, body)


def test_one_block_gets_no_more_connections_than_its_share() -> None:
    limits = OriginLimits(block=4)

    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        inside = [joined(world, host, f"{PUBLIC}{host}") for host in range(1, 11)]
        assert sum([await guard.lets_in(each) for each in inside]) == 4
        assert guard.transport.slots.turned_away["block"] == 6
        assert await guard.lets_in(joined(world, 11, "198.51.100.1"))
        await guard.transport.disconnect(guard.transport.peers()[0])

    guarded(12, body, limits)


@pytest.mark.parametrize("block", [PUBLIC, "10.0.0."])
def test_one_address_keeps_no_neighbour_out_nor_the_node_from_dialling_one(block: str) -> None:
    limits = OriginLimits(block=8, address=8, private_block=8)

    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        greedy = [joined(world, host, f"{block}7") for host in range(1, 44)]
        assert sum([await guard.lets_in(each) for each in greedy]) == 8
        neighbours = [joined(world, 50 + host, f"{block}{100 + host}") for host in range(6)]
        assert [await guard.lets_in(each) for each in neighbours[:3]] == [True] * 3
        for each in neighbours[3:]:
            await guard.transport.connect(each.addresses()[0])
        for each in greedy:
            await guard.lets_in(each)
        await trio.sleep(1.0)
        assert {each.peer_id for each in neighbours} <= set(guard.transport.peers())
        assert guard.transport.slots.evicted == {"block": 3}

    guarded(60, body, limits)


def test_a_block_whose_peers_lie_is_banned_and_others_are_not() -> None:
    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        inside = [joined(world, host, f"{PUBLIC}{host}") for host in range(1, 6)]
        outside = joined(world, 6, "198.51.100.1")
        for each in [*inside, outside]:
            assert await guard.lets_in(each)
        for each in inside[:3]:
            guard.lie(each.peer_id)
        await trio.sleep(0.1)
        assert inside[4].peer_id in guard.transport.peers()  # three bad ones do not do for it
        guard.lie(inside[3].peer_id)
        await trio.sleep(0.1)
        assert guard.transport.peers() == (outside.peer_id,)
        assert not await guard.lets_in(inside[4])
        assert guard.gater.refused_connections["banned block"] == 1
        assert not guard.gater.is_banned(inside[4].peer_id)
        assert [ban.subject for ban in guard.told if ban.is_block] == ["192.0.2.0/24"]

    guarded(7, body)


def test_a_private_block_is_never_banned_and_shares_no_quota() -> None:
    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        inside = [joined(world, host, f"10.0.0.{host}") for host in range(1, 42)]
        for each in inside:  # more than a public block may have
            assert await guard.lets_in(each)
        for each in inside[:40]:
            guard.lie(each.peer_id)
        await trio.sleep(0.1)
        assert guard.transport.peers() == (inside[40].peer_id,)
        assert not any(ban.is_block for ban in guard.gater.bans())
        assert guard.gater.share_of(inside[40].peer_id) == inside[40].peer_id

    guarded(42, body)


def test_whoever_goes_on_asking_is_banned_and_whoever_waits_is_not() -> None:
    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        flood, patient = world.join(1), world.join(2)
        assert await guard.lets_in(flood)
        assert await guard.lets_in(patient)
        burst = int(RATES[Kind.WANT].burst)
        for _ in range(5 * burst):
            guard.gater.allows(Kind.WANT, flood.peer_id)
        for _ in range(5 * burst):
            assert guard.gater.allows(Kind.WANT, patient.peer_id)
            await trio.sleep(1 / RATES[Kind.WANT].per_s)
        assert guard.gater.banned_peers() == {flood.peer_id}
        assert guard.ledger.account(flood.peer_id).rejected == {Reject.FLOOD: 4}

    guarded(3, body)


def test_forwarding_many_adverts_is_cut_short_and_no_offence() -> None:
    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        forwarder = world.join(1)
        assert await guard.lets_in(forwarder)
        burst = int(RATES[Kind.ADVERT].burst)
        passed = [guard.gater.allows(Kind.ADVERT, forwarder.peer_id) for _ in range(10 * burst)]
        assert sum(passed) == burst
        assert not guard.ledger.rejected
        assert not guard.gater.bans()

    guarded(2, body)


def test_relayed_peers_take_no_more_than_their_part_of_the_connections() -> None:
    limits = OriginLimits(relayed=4)

    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        hidden = [joined(world, host, HIDDEN) for host in range(1, 11)]
        assert sum([await guard.lets_in(each) for each in hidden]) == 4
        assert guard.transport.slots.turned_away["relayed"] == 6
        assert await guard.lets_in(world.join(11))
        await guard.transport.disconnect(hidden[0].peer_id)
        assert await guard.lets_in(hidden[9])

    guarded(12, body, limits)


def test_relayed_peers_share_one_quota_and_no_ban() -> None:
    async def body(world: SimulatedWorld, guard: Guarded) -> None:
        hidden = [joined(world, host, HIDDEN) for host in range(1, 21)]
        direct = world.join(21)
        for each in [*hidden, direct]:
            assert await guard.lets_in(each)
        burst = RATES[Kind.WANT].burst
        asked = [each.peer_id for each in hidden for _ in range(int(burst))]
        assert sum(guard.gater.allows(Kind.WANT, each) for each in asked) == RELAYED_SHARE * burst
        assert guard.gater.allows(Kind.WANT, direct.peer_id)
        assert {guard.gater.share_of(each.peer_id) for each in hidden} == {RELAYED}
        for each in hidden[:10]:
            guard.lie(each.peer_id)
        await trio.sleep(0.1)
        assert len(guard.transport.peers()) == 11
        assert not any(ban.is_block for ban in guard.gater.bans())

    guarded(22, body)
