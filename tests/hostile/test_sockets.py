"""Attacks below messages, on a node's services over real sockets: others are served all the same,
and nothing of the attack stays behind."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

import pytest
import trio

from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.errors import Reject, SwarmError
from swarm.exchange.exchange_service import Exchange, ExchangeRules
from swarm.exchange.pool import Pool, PoolLimits
from swarm.identity import Identity, PeerId
from swarm.limits import quotas
from swarm.limits.bounded_table import OriginLimits
from swarm.limits.quotas import BLOCK_SHARE, RATES, Kind
from swarm.peers.connection_gater import CONNECTION_LIMITS, ConnectionGater
from swarm.peers.discovery import AddressBook, Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.rollouts import Completion, FinishReason, RolloutGroup, Task
from swarm.simulation.liar import LIFE_S, Liar
from swarm.simulation.lies import CATALOGUE, hello
from swarm.storage import Runtime
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.wire import codec
from swarm.wire.messages import HELLO_PROTOCOL, HELLO_REPLY_BYTES_MAX, HelloReply
from tests.hostile.attack import Assault, attacked, load_all
from tests.hostile.attacks import ON_SOCKETS
from tests.hostile.wire import Door
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
RUN_ID = "run"
WAIT_S = 60.0
ASKED_MEANWHILE = 10
PAUSE_S = 0.2
IDENTITIES = 30


def now_s() -> float:
    return EPOCH_S + trio.current_time()


def group_of(producer: PeerId, index: int) -> RolloutGroup:
    created_at_s = int(now_s())
    return RolloutGroup(
        run_id=RUN_ID,
        producer=producer,
        round=1,
        task=Task("any", "1", "{}", index, index),
        completions=(Completion("12", (1, 2), (-0.1, -0.1), FinishReason.STOP, 1),) * 4,
        tokenizer="any",
        temperature=1.0,
        top_p=1.0,
        created_at_s=created_at_s,
        expires_at_s=created_at_s + LIFE_S,
    )


async def approve(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
    await trio.lowlevel.checkpoint()
    return "prompt", (0.0, 1.0, 0.0, 1.0)


@dataclass
class Target:
    """A node's services, and an honest peer that uses them."""

    transport: Libp2pTransport
    gater: ConnectionGater
    friend: Liar  # one that tells no lies

    @property
    def address(self) -> str:
        return self.transport.addresses()[0]

    async def serves(self, liar: Liar) -> bool:
        """Whether a proper hello of this peer is answered."""
        try:
            answer = await liar.transport.request(
                self.transport.peer_id,
                HELLO_PROTOCOL,
                hello(liar, liar.identity),
                timeout_s=WAIT_S,
                response_bytes_max=HELLO_REPLY_BYTES_MAX,
            )
        except SwarmError:
            return False
        return codec.decode(answer, HelloReply, HELLO_REPLY_BYTES_MAX).run_id == RUN_ID

    def streams_of(self, peer: PeerId) -> int:
        """How many streams the target has open with a peer, its own included."""
        connections = [
            each
            for key, group in self.transport._network.connections.items()
            for each in group
            if str(key) == peer
        ]
        return sum(len(each.muxed_conn.streams) for each in connections)


@asynccontextmanager
async def peer(name: bytes) -> AsyncIterator[Liar]:
    identity = Identity(name.ljust(32, b"."))
    async with open_libp2p(identity, LOOPBACK) as transport:
        liar = Liar(
            identity=identity,
            transport=transport,
            run_id=RUN_ID,
            make_group=group_of,
            now_s=now_s,
            rng=Random(str(name)),
            victim=Identity(b"v" * 32),
        )
        await liar.serve()
        yield liar


@asynccontextmanager
async def node(limits: OriginLimits = CONNECTION_LIMITS) -> AsyncIterator[Target]:
    identity = Identity(b"t" * 32)
    async with (
        open_libp2p(identity, LOOPBACK) as transport,
        peer(b"friend") as friend,
        trio.open_nursery() as nursery,
    ):
        gater = ConnectionGater(transport, Ledger(), limits)
        shared = {"now_s": now_s, "rng": Random(1), "run_sync": run_inline}
        exchange = Exchange(
            ExchangeRules(RUN_ID, 8, record_life_s=3600, clock_skew_s=60, group_size_max=8),
            identity,
            transport,
            Pool(":memory:", PoolLimits()),
            approve,
            Runtime(**shared),
            gater,
        )
        discovery = Discovery(
            NodeInfo(RUN_ID, "target", identity, bytes(16)), (), AddressBook(), gater, **shared
        )
        nursery.start_soon(gater.run)
        await nursery.start(exchange.run)
        await nursery.start(discovery.run)
        await friend.transport.connect(transport.addresses()[0])
        yield Target(transport, gater, friend)
        nursery.cancel_scope.cancel()


async def until(condition: object) -> None:
    assert callable(condition)
    with trio.fail_after(WAIT_S):
        while not condition():  # noqa: ASYNC110  transports announce no changes
            await trio.sleep(0.05)


@pytest.mark.parametrize(("name", "reason"), ON_SOCKETS.items(), ids=ON_SOCKETS)
def test_others_are_served_during_it_and_nothing_stays_behind(
    name: str, reason: Reject | None
) -> None:
    load_all()
    liar = Identity(b"l" * 32)

    async def main() -> None:
        async with node() as target:
            door = Door.of(target.address)
            assault = Assault(name, door, RUN_ID, WAIT_S, network="127.9", identity=liar)
            counted = target.gater.ledger.account(liar.peer_id).rejected
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attacked, assault)
                await until(lambda: assault.spent.connections)
                for _ in range(ASKED_MEANWHILE):
                    assert await target.serves(target.friend)
                    await trio.sleep(PAUSE_S)
                await until(lambda: reason is None or counted[reason])
                nursery.cancel_scope.cancel()
            await until(lambda: not target.streams_of(liar.peer_id))
            assert await target.serves(target.friend)
            assert reason is not None or not counted
            if reason is not Reject.FLOOD:
                assert target.gater.banned_peers() == ({liar.peer_id} if reason else set())

    run(main, timeout_s=3 * WAIT_S)


def test_lies_over_real_sockets_end_in_a_closed_connection() -> None:
    told = [lie for lie in CATALOGUE if lie.name in ("advert_garbage", "want_bomb", "signature")]
    assert len(told) == 3

    async def main() -> None:
        async with node() as target, peer(b"liar") as liar:
            await liar.transport.connect(target.address)
            await target.friend.transport.connect(liar.transport.addresses()[0])
            while not target.gater.is_banned(liar.identity.peer_id):
                for lie in told:
                    await lie.tell(liar)
                    await trio.sleep(0.2)
            await until(lambda: liar.identity.peer_id not in target.transport.peers())
            with suppress(SwarmError):  # the dialling side may see the refusal a little later
                await liar.transport.connect(target.address)
            await until(lambda: target.transport.peer_id not in liar.transport.peers())
            assert target.gater.refused_connections["banned peer"] > 0
            assert target.gater.banned_peers() == {liar.identity.peer_id}
            assert await target.serves(target.friend)

    run(main, timeout_s=3 * WAIT_S)


def test_many_identities_from_one_address_get_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is treated here as any public address is."""
    monkeypatch.setattr(quotas, "is_public", lambda ip: ip is not None)
    limits = OriginLimits(private_block=8)
    burst = RATES[Kind.HELLO].burst * BLOCK_SHARE

    async def main() -> None:
        async with node(limits) as target, AsyncExitStack() as stack:
            served = 0
            for number in range(IDENTITIES):
                liar = await stack.enter_async_context(peer(f"sybil {number}".encode()))
                with suppress(SwarmError):
                    await liar.transport.connect(target.address)
                    before = trio.current_time()
                    answers = [await target.serves(liar) for _ in range(12)]
                    served += sum(answers)
                    assert trio.current_time() >= before
                assert len(target.transport.peers()) <= 8
            crowded = target.transport._network.slots.turned_away["block"]
            refused = target.gater.refused_connections["too often"]
            assert crowded + refused >= IDENTITIES - 8
            assert served <= burst + RATES[Kind.HELLO].per_s * BLOCK_SHARE * trio.current_time()
            assert 0 < served <= 12 * 8
            assert not target.gater.ledger.rejected[Reject.FLOOD]
            assert target.friend.identity.peer_id in target.transport.peers()

    run(main, timeout_s=3 * WAIT_S)
