"""What a node shared before it was killed is not lost to the others."""

from random import Random

from node.simulation.simulated_nodes import run_inline
from swarm.exchange.exchange_service import Exchange
from swarm.storage import Runtime
from tests.simulation.exchanges import approve, exchanges, now_s, until
from tests.support import run


def test_what_was_shared_before_a_crash_is_known_again_after_it() -> None:
    async def main() -> None:
        async with exchanges(2) as swarm:
            first, second = swarm.peers
            shared = await first.share_new(3)  # nobody listens yet
            before = first.exchange._advert_cache.choose(9, now_s(), Random(0))
            first.exchange = Exchange(
                first.exchange._rules,
                first.identity,
                first.transport,
                first.pool,
                approve,
                Runtime(now_s, Random(0), run_inline),
            )
            await swarm.start(0, 1)
            assert first.exchange._advert_cache.choose(9, now_s(), Random(0)) == before
            await until(lambda: second.has(shared))

    run(main, virtual=True, timeout_s=1000)
