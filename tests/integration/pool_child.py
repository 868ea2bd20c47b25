"""Fills a pool until it is killed: `pool_child.py PATH` prints each group id once it is in."""

import sys

from swarm.exchange.pool import AddResult, Pool, PoolLimits
from tests.pool_samples import PRODUCERS, add, make_group


def main(path: str) -> None:
    pool = Pool(path, PoolLimits(groups_max=100_000, groups_per_producer_max=100_000))
    for index in range(100_000):
        record, verified = make_group(index % len(PRODUCERS), index)
        assert add(pool, record, verified, 1_500.0) is AddResult.ADDED
        if index % 3 == 0:
            pool.mark_trained([verified.group_id], index)
        sys.stdout.write(f"{index % 3 == 0} {verified.group_id.hex()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
