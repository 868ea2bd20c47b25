"""One scenario on real sockets and in the simulation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.simulation.profiles import links_of

ROOT = Path(__file__).parents[2]
FETCHED = 2**20


@pytest.mark.netns
def test_both_worlds_run_it_and_neither_is_faster_than_its_links() -> None:
    command = [sys.executable, "scripts/lab/compare_worlds.py", "--profile", "cable"]
    said = subprocess.run(
        [*command, "--hosts", "2", "--repeats", "2", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    worlds = json.loads(said)
    assert set(worlds) == {"real", "simulated"}
    assert set(worlds["real"]) == set(worlds["simulated"])
    link = links_of("cable", 1)[0]
    for world in worlds.values():
        assert len(world["4 KB gossiped"]) == 2
        assert min(world["connect"]) >= 2 * link.latency_s
        assert min(world["round trip"]) >= 2 * link.latency_s
        assert min(world["4 KB gossiped"]) >= link.latency_s
        assert min(world["1 MB fetched"]) >= 2 * link.latency_s + FETCHED / link.up_bytes_per_s
