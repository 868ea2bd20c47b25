"""A node's part in the exchange of rollout groups: its pool, and the exchange that fills it.

Only a role that draws groups has one. How many it keeps ready follows from how many it draws.
"""

from typing import Final

import trio

from node.config import NodeConfig
from node.roles.peer import Network, Peer
from swarm.exchange.fetching import Verify
from swarm.exchange.pool import Pool, PoolLimits, PoolStatistics
from swarm.exchange.service import Exchange, ExchangeRules
from swarm.storage.files import Runtime

STOCK_FACTOR: Final = 3  # foreign groups kept ready, in multiples of what a round or step draws
POOL_LOOK_S: Final = 2.0  # how old the pool's figures in a snapshot may be
FETCH_PARALLEL: Final = 4  # peers that groups are fetched from at a time
POOL_FILE: Final = "pool.sqlite"


def pool_limits(config: NodeConfig) -> PoolLimits:
    """The bounds of a node's pool."""
    return PoolLimits(bytes_max=config.pool_bytes_max)


def exchange_rules(config: NodeConfig, draws: int) -> ExchangeRules:
    """The rules of a role that draws at most so many groups in a round or step."""
    limits = config.run.limits
    return ExchangeRules(
        run_id=config.run.run_id,
        stock_groups=STOCK_FACTOR * draws,
        record_life_s=limits.record_life_s,
        clock_skew_s=limits.clock_skew_s,
        group_size_max=limits.group_size_max,
        group_bytes_max=config.run.group_bytes_max,
        fetch_parallel=FETCH_PARALLEL,
        fetch_bytes_per_s=float(config.fetch_bytes_per_s_max),
        serve_bytes_per_s=float(config.serve_bytes_per_s_max),
    )


class RolloutSharing:
    """One node's pool and exchange. `run` serves and fetches until cancelled."""

    def __init__(
        self,
        world: Network,
        config: NodeConfig,
        peer: Peer,
        pool: Pool,
        verify: Verify,
        draws: int,
    ) -> None:
        self.pool = pool
        self.figures = PoolStatistics(0, 0, 0, 0, 0, {})
        self._world = world
        self.exchange = Exchange(
            exchange_rules(config, draws),
            peer.identity,
            peer.transport,
            pool,
            verify,
            Runtime(world.now_s, world.rng("exchange"), world.run_sync),
            peer.gater,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and fetch until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.exchange.run)
            task_status.started()
            while True:
                look = self.pool.statistics
                self.figures = await self._world.run_sync(look, self._world.now_s())
                await trio.sleep(POOL_LOOK_S)

    def oldest_s(self) -> float | None:
        """The age of the oldest foreign group that may still be drawn."""
        oldest_s = self.figures.oldest_eligible_at_s
        return None if oldest_s is None else max(0.0, self._world.now_s() - oldest_s)
