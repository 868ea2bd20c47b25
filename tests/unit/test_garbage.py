"""A node's memory: a full search for garbage keeps its event loop, so that what is loaded is not
searched; and what it has freed goes back to the system."""

import platform
import subprocess
import sys

import pytest

SEARCH = """
import gc, time
import node.run.app, node.system.machine, node.run.node, swarm.transport.libp2p.host

def search_s():
    began_s = time.process_time()
    gc.collect()
    return time.process_time() - began_s

gc.collect()
before_s = min(search_s() for _ in range(3))
{keep}
print(before_s / max(1e-6, min(search_s() for _ in range(3))))
"""


def times_shorter(keep: str) -> float:
    told = subprocess.run(
        [sys.executable, "-c", SEARCH.format(keep=keep)], capture_output=True, text=True, check=True
    )
    return float(told.stdout)


@pytest.mark.slow
def test_a_node_that_is_up_does_not_search_what_it_has_loaded() -> None:
    assert times_shorter("node.system.machine.freeze_garbage_collector()") > 20
    assert times_shorter("") < 3


HELD = """
import os
import psutil
from node.system.machine import give_back

def held_mb():
    return psutil.Process().memory_info().rss / 2**20

before = held_mb()
large = [os.urandom(60_000) for _ in range(1_000)]
del large[1:-20]  # the last stay, so that the heap does not shrink by itself
{give_back}
print(held_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_what_a_node_has_freed_goes_back_to_the_system() -> None:
    def held_mb(code: str) -> float:
        words = [sys.executable, "-c", HELD.format(give_back=code)]
        return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert held_mb("give_back()") < 8
    assert held_mb("") > 40
