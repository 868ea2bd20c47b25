"""The hash table: strangers lead to one's own run, and nobody can make it grow."""

from collections.abc import Sequence
from random import Random

import trio

from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.errors import Reject, RequestRefused
from swarm.identity import Identity, PeerId
from swarm.limits.address_blocks import path_of
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.dht import (
    BUCKET_PEERS_MAX,
    BUCKETS_MAX,
    ENTRIES_MAX,
    HOLDERS,
    KEYS_PER_PROVIDER_MAX,
    LOOKUP_PARALLEL,
    LOOKUP_PEERS_MAX,
    PROVIDER_LIFE_S,
    PROVIDERS_PER_KEY_MAX,
    Dht,
    Store,
    Table,
    _Lookup,
    key_of,
    point_of,
)
from swarm.peers.discovery import Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.base import ServeLimits
from swarm.transport.memory.network import MemoryTransport
from swarm.wire import codec
from swarm.wire.messages import (
    CLOSER_PER_REPLY_MAX,
    PROVIDERS_BYTES_MAX,
    PROVIDERS_PER_REPLY_MAX,
    PROVIDERS_PROTOCOL,
    PROVIDERS_REPLY_BYTES_MAX,
    FindProviders,
    KnownPeer,
    ProvidersReply,
)

LAN = LinkProfile(latency_s=0.02)


class Member:
    """Discovery and the table on one host, as a node has them."""

    def __init__(
        self,
        world: SimulatedWorld,
        host: int,
        run_id: str,
        bootstrap: Sequence[str] = (),
        *,
        serves: bool = True,
    ) -> None:
        self.transport = world.join(host)
        gater = self.gater = ConnectionGater(self.transport, Ledger())
        self.discovery = Discovery(
            NodeInfo(run_id, "test", world.identities[host], bytes([host]) * 16),
            bootstrap,
            AddressBook(),
            gater,
            now_s=lambda: EPOCH_S + trio.current_time(),
            rng=world.rng(f"discovery/{host}"),
            run_sync=run_inline,
        )
        self.found: set[PeerId] = set()
        self.dht = Dht(
            key_of(run_id),
            gater,
            bootstrap,
            self._learn,
            lambda: True,
            rng=world.rng(f"dht/{host}"),
            serves=lambda: serves,
        )

    def _learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self.found.add(peer)
        self.discovery.learn_found(peer, addresses, by="the hash table")

    def start(self, nursery: trio.Nursery, *, dht: bool = True) -> None:
        nursery.start_soon(self.discovery.run)
        if dht:
            nursery.start_soon(self.dht.run)


def peers_of_the_small_run(*, dht: bool) -> list[int]:
    """Six nodes of one run, and two of another, each of which knows one of the six."""

    async def main() -> list[int]:
        async with open_world(3, 8, LAN) as world, trio.open_nursery() as nursery:
            first = Member(world, 0, "large")
            large = [first]
            large += [
                Member(world, host, "large", first.transport.addresses()) for host in range(1, 6)
            ]
            for member in large:
                member.start(nursery, dht=dht)
            await trio.sleep(150)
            small = [
                Member(world, host, "small", large[known].transport.addresses())
                for host, known in ((6, 1), (7, 4))
            ]
            for member in small:
                member.start(nursery, dht=dht)
            await trio.sleep(300)
            result = [len(member.discovery.peers) for member in small]
            nursery.cancel_scope.cancel()
            return result

    return deterministic_run(main, seed=3)  # type: ignore[no-any-return]


def test_strangers_lead_to_ones_own_run() -> None:
    assert peers_of_the_small_run(dht=True) == [1, 1]
    assert peers_of_the_small_run(dht=False) == [0, 0], "they have no other way: the test can fail"


def test_a_client_asks_and_is_not_asked() -> None:
    async def main() -> None:
        async with open_world(1, 2, LAN) as world, trio.open_nursery() as nursery:
            server = Member(world, 0, "a")
            client = Member(world, 1, "a", server.transport.addresses(), serves=False)
            for member in (server, client):
                nursery.start_soon(member.dht.run)
            await trio.sleep(10)
            assert server.dht.store.members(key_of("a"), trio.current_time())[0][
                0
            ] == world.peer_id(1)
            assert client.dht.table.closest(key_of("a"), 9)
            assert not server.dht.table.closest(key_of("a"), 9)
            nursery.cancel_scope.cancel()

    deterministic_run(main, seed=1)


# --- hostile peers -----------------------------------------------------------------------------


class Liar:
    """Answers each question with peers that do not exist, always closer ones."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.draw = Random(1)
        self.asked = 0
        self.providers: tuple[KnownPeer, ...] = ()
        transport.serve(
            PROVIDERS_PROTOCOL, self.answer,
            ServeLimits(PROVIDERS_BYTES_MAX, PROVIDERS_REPLY_BYTES_MAX),
        )  # fmt: skip

    async def answer(self, peer: PeerId, payload: bytes) -> bytes:
        self.asked += 1
        invented = [Identity(self.draw.randbytes(32)).peer_id for _ in range(CLOSER_PER_REPLY_MAX)]
        closer = tuple(
            KnownPeer(peer_id=each, addresses=(f"/memory/{10**6}/p2p/{each}",)) for each in invented
        )
        reply = ProvidersReply(type="providers", providers=self.providers, closer=closer)
        return codec.encode(reply)


def test_a_walk_among_liars_ends_and_leaves_nothing() -> None:
    async def main() -> None:
        async with open_world(1, 2, LAN) as world, trio.open_nursery():
            liar = Liar(world.join(0))
            own = Member(world, 1, "a", liar.transport.addresses())
            dialled: list[str] = []
            connect = own.transport.connect

            async def counted(address: str, *, timeout_s: float = 15.0) -> PeerId:
                dialled.append(address)
                return await connect(address, timeout_s=timeout_s)

            own.transport.connect = counted  # type: ignore[method-assign]
            await own.dht.look_up()
            assert len(dialled) <= LOOKUP_PEERS_MAX
            assert liar.asked == 2, "once for a walk, once to be told of us"
            assert not own.found
            assert [peer for peer, _ in own.dht.table.closest(bytes(32), 99)] == [world.peer_id(0)]

    deterministic_run(main, seed=1)


def test_who_names_what_nobody_can_be_called_pays_for_it() -> None:
    async def main() -> None:
        async with open_world(1, 2, LAN) as world, trio.open_nursery():
            liar = Liar(world.join(0))
            own = Member(world, 1, "a", liar.transport.addresses())
            await own.dht.look_up()
            assert not own.gater.ledger.rejected
            liar.providers = (KnownPeer(peer_id="nobody", addresses=("/memory/1/p2p/nobody",)),)
            await own.dht.look_up()
            assert own.gater.ledger.account(liar.transport.peer_id).rejected == {
                Reject.MALFORMED: 1
            }
            assert not own.found

    deterministic_run(main, seed=1)


def test_what_is_asked_too_often_or_said_of_others_is_refused() -> None:
    async def main() -> None:
        async with open_world(1, 2, LAN) as world, trio.open_nursery() as nursery:
            own = Member(world, 0, "a")
            nursery.start_soon(own.dht.run)
            asker = world.join(1)
            await asker.connect(own.transport.addresses()[0])
            other = Identity(b"o" * 32).peer_id
            request = FindProviders(
                type="find_providers", key=bytes(32), intent="provide",
                addresses=(f"/memory/9/p2p/{other}",),
            )  # fmt: skip
            refused = 0
            for _ in range(60):
                try:
                    await asker.request(
                        own.transport.peer_id, PROVIDERS_PROTOCOL, codec.encode(request),
                        timeout_s=5, response_bytes_max=PROVIDERS_REPLY_BYTES_MAX,
                    )  # fmt: skip
                except RequestRefused:
                    refused += 1
            assert refused > 20
            assert not own.dht.store.runs
            nursery.cancel_scope.cancel()

    deterministic_run(main, seed=1)


def test_the_store_is_bounded_and_forgets() -> None:
    store, draw = Store(), Random(1)
    for number in range(2 * ENTRIES_MAX):
        store.put(number.to_bytes(32, "big"), PeerId(f"peer {number}"), ["x"], 0.0)
    assert len(store.runs) == ENTRIES_MAX
    for number in range(2 * PROVIDERS_PER_KEY_MAX):
        store.put(bytes(32), PeerId(f"other {number}"), ["x"], 0.0)
    assert len(store.members(bytes(32), 0.0)) == PROVIDERS_PER_KEY_MAX
    assert store.members(bytes(32), PROVIDER_LIFE_S - 1)
    assert not store.members(bytes(32), PROVIDER_LIFE_S)
    assert bytes(32) not in store.runs
    store, greedy = Store(), PeerId("greedy")
    for _ in range(3 * KEYS_PER_PROVIDER_MAX):
        store.put(draw.randbytes(32), greedy, ["x"], 0.0)
    assert sum(greedy in each for each in store.runs.values()) == KEYS_PER_PROVIDER_MAX


GREEDY = path_of("203.0.113.7")


def test_keys_without_number_of_one_address_hide_no_provider_and_remove_no_run() -> None:
    store, draw = Store(), Random(1)
    honest = [PeerId(f"honest {number}") for number in range(5)]
    for number, peer in enumerate(honest):
        store.put(bytes(32), peer, ["x"], 0.0, path_of(f"198.51.{number}.1"))
    store.put(b"o" * 32, PeerId("other run"), ["x"], 0.0, path_of("203.0.113.8"))
    for number in range(1_000):
        store.put(bytes(32), PeerId(f"early {number}"), ["x"], 0.0, GREEDY)
    found = {peer for peer, _ in store.choose(bytes(32), PROVIDERS_PER_REPLY_MAX, 2.0, draw)}
    assert found > set(honest)
    for number in range(ENTRIES_MAX):
        for key in (bytes(32), draw.randbytes(32), draw.randbytes(32), draw.randbytes(32)):
            store.put(key, PeerId(f"greedy {number}"), ["x"], 1.0, GREEDY)
    assert len(store.members(bytes(32), 2.0)) <= PROVIDERS_PER_KEY_MAX
    found = {peer for peer, _ in store.choose(bytes(32), PROVIDERS_PER_REPLY_MAX, 2.0, draw)}
    assert found >= set(honest)
    assert [peer for peer, _ in store.members(b"o" * 32, 2.0)] == ["other run"]
    assert sum(map(len, store.runs.values())) == ENTRIES_MAX


def test_one_address_fills_no_bucket() -> None:
    draw = Random(1)
    table = Table(bytes(32))
    near = [Identity(draw.randbytes(32)).peer_id for _ in range(200)]
    for peer in near[:-5]:
        table.add(peer, ["x"], GREEDY)
    honest = near[-5:]
    for number, peer in enumerate(honest):
        table.add(peer, ["x"], path_of(f"198.51.{number}.1"))
    assert set(honest) <= dict(table.closest(bytes(32), 999)).keys()


def test_a_walk_asks_one_of_each_block_before_two_of_any() -> None:
    draw = Random(1)
    greedy = [Identity(draw.randbytes(32)).peer_id for _ in range(1_000)]
    honest = [Identity(draw.randbytes(32)).peer_id for _ in range(5)]
    lookup = _Lookup(bytes(32))
    lookup.where = {peer: (f"/ip4/203.0.113.7/tcp/4001/p2p/{peer}",) for peer in greedy}
    lookup.where |= {
        peer: (f"/ip4/198.51.{number}.7/tcp/4001/p2p/{peer}",) for number, peer in enumerate(honest)
    }
    asked = [peer for _ in range(2) for peer in lookup.next(LOOKUP_PARALLEL)]
    assert set(honest) <= set(asked)
    lookup.answered = [*greedy, *honest]
    assert len(set(honest) & set(lookup.holders())) >= HOLDERS - 1


def test_the_table_is_bounded_and_keeps_who_answered_first() -> None:
    draw = Random(1)
    peers = [Identity(draw.randbytes(32)).peer_id for _ in range(400)]
    table = Table(point_of(peers[0]))
    for peer in peers[1:]:
        table.add(peer, [f"/memory/1/p2p/{peer}"])
    known = table.closest(bytes(32), 1000)
    assert 8 * BUCKET_PEERS_MAX > len(known) > BUCKET_PEERS_MAX
    assert len(known) <= BUCKETS_MAX * BUCKET_PEERS_MAX
    assert all(len(bucket) <= BUCKET_PEERS_MAX for bucket in table.buckets.values())
    assert peers[1] in dict(known)
    table.drop(peers[1])
    assert peers[1] not in dict(table.closest(bytes(32), 1000))
