"""Exchanges alone, without rounds or discovery: hosts of a simulated network, all connected."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import trio

from node.engines.scripted import TOKENIZER
from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.errors import Reject
from swarm.exchange.exchange_service import Exchange, ExchangeRules
from swarm.exchange.pool import Pool, PoolLimits
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup, ScoredGroup, Task
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, open_world
from swarm.storage import Runtime
from swarm.transport.base import ServeLimits
from swarm.transport.memory.network import MemoryTransport
from swarm.wire.messages import WANT_BYTES_MAX

RUN_ID = "run"
LINK = LinkProfile(latency_s=0.02)
REWARDS = (0.0, 1.0, 0.0, 1.0)


def now_s() -> float:
    return EPOCH_S + trio.current_time()


def group_of(identity: Identity, index: int, round_: int = 1, text: str = "12") -> RolloutGroup:
    created_at_s = int(now_s())
    return RolloutGroup(
        run_id=RUN_ID,
        producer=identity.peer_id,
        round=round_,
        task=Task("scripted_sum", "1", "{}", index, index),
        completions=(Completion(text, (1, 2), (-0.1, -0.1), FinishReason.STOP, 1),) * len(REWARDS),
        tokenizer=TOKENIZER,
        temperature=1.0,
        top_p=1.0,
        created_at_s=created_at_s,
        expires_at_s=created_at_s + 900,
    )


async def approve(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
    await trio.lowlevel.checkpoint()
    return f"prompt {group.task.index}", REWARDS


@dataclass
class Peer:
    """One host with an exchange."""

    identity: Identity
    exchange: Exchange
    transport: MemoryTransport
    pool: Pool

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    async def share(self, *groups: RolloutGroup) -> list[ScoredGroup]:
        prompts = [f"prompt {group.task.index}" for group in groups]
        return await self.exchange.share(groups, prompts, [REWARDS] * len(groups))

    async def share_new(self, count: int, first: int = 0, **how: Any) -> list[ScoredGroup]:
        return await self.share(*(group_of(self.identity, first + n, **how) for n in range(count)))

    def has(self, groups: list[ScoredGroup]) -> bool:
        return len(self.pool.groups([each.group_id for each in groups])) == len(groups)

    def blamed(self, other: "Peer") -> dict[Reject, int]:
        return dict(self.exchange.ledger.account(other.peer_id).rejected)

    def serve(self, protocol: str, handle: Callable[[PeerId, bytes], Awaitable[bytes]]) -> None:
        """Answer in place of the exchange, which must not run."""
        self.transport.serve(protocol, handle, ServeLimits(WANT_BYTES_MAX, 4_194_304, timeout_s=99))


async def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Wait for something; how many virtual seconds that took."""
    began = trio.current_time()
    with trio.fail_after(timeout_s):
        while not is_so():  # noqa: ASYNC110 - what is waited for sets no event
            await trio.sleep(0.05)
    return trio.current_time() - began


@dataclass
class Swarm:
    """Hosts whose exchanges start when the test says so."""

    world: SimulatedWorld
    peers: list[Peer]
    nursery: trio.Nursery

    async def start(self, *hosts: int) -> None:
        for host in hosts:
            await self.nursery.start(self.peers[host].exchange.run)

    async def connect_all(self) -> None:
        for one in self.peers:
            for other in self.peers[self.peers.index(one) + 1 :]:
                await one.transport.connect(other.transport.addresses()[0], timeout_s=30.0)

    def partition(self, one: int, *others: int) -> None:
        self.world.network.partition(
            {self.peers[one].peer_id}, {self.peers[host].peer_id for host in others}
        )


@asynccontextmanager
async def exchanges(
    hosts: int,
    profile: LinkProfile = LINK,
    profiles: Mapping[int, LinkProfile] | None = None,
    verify: Any = approve,
    **rules: Any,
) -> AsyncIterator[Swarm]:
    """Connected hosts; none of their exchanges runs yet."""
    settings = {
        "run_id": RUN_ID,
        "stock_groups": 8,
        "record_life_s": 3600,
        "clock_skew_s": 60,
        "group_size_max": 8,
        **rules,
    }
    async with (
        open_world(1, hosts, profile, profiles) as world,
        AsyncExitStack() as stack,
        trio.open_nursery() as nursery,
    ):
        peers = []
        for host in range(hosts):
            transport = world.join(host)
            pool = stack.enter_context(Pool(":memory:", PoolLimits(1_000, 100_000_000, 1_000)))
            exchange = Exchange(
                ExchangeRules(**settings),
                world.identities[host],
                transport,
                pool,
                verify,
                Runtime(now_s, Random(host), run_inline),
            )
            peers.append(Peer(world.identities[host], exchange, transport, pool))
        swarm = Swarm(world, peers, nursery)
        await swarm.connect_all()
        yield swarm
        nursery.cancel_scope.cancel()
