"""A pool whose process is killed in the middle of writing."""

import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import LocalProtocolError
from swarm.exchange.pool import Pool, PoolLimits
from swarm.rollouts import GroupId

ROOT = Path(__file__).parents[2]


@pytest.mark.integration
@pytest.mark.parametrize("acknowledged_min", [1, 20, 150])
def test_every_acknowledged_group_outlives_kill_9(tmp_path: Path, acknowledged_min: int) -> None:
    path = tmp_path / "pool.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.pool_child", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    with child, child.stdout:
        lines = [child.stdout.readline() for _ in range(acknowledged_min)]
        child.kill()
        lines += child.stdout.readlines()
    acknowledged = [line.split() for line in lines if line.endswith("\n")]
    assert len(acknowledged) >= acknowledged_min
    check(path, [(text == "True", GroupId(bytes.fromhex(name))) for text, name in acknowledged])


def check(path: Path, acknowledged: list[tuple[bool, GroupId]]) -> None:
    with Pool(path, PoolLimits(100_000, groups_per_producer_max=100_000)) as pool:
        assert pool.damaged_path is None
        (sound,) = pool._db.execute("PRAGMA integrity_check").fetchone()
        assert sound == "ok"
        ids = [group_id for _, group_id in acknowledged]
        assert [each.group_id for each in pool.groups(ids)] == ids
        assert pool.statistics().groups in (len(ids), len(ids) + 1)
        for trained, group_id in acknowledged:
            if trained:
                with pytest.raises(LocalProtocolError, match="already"):
                    pool.mark_trained([group_id], 1_000_000)
            else:
                pool.mark_trained([group_id], 1_000_000)
