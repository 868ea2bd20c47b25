"""A full search for garbage keeps a node's event loop; what is loaded is not searched."""

import subprocess
import sys

SEARCH = """
import gc, time
import node.app, node.node, swarm.transport.libp2p.host

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


def test_a_node_that_is_up_does_not_search_what_it_has_loaded() -> None:
    assert times_shorter("node.app.keep_what_is_loaded()") > 20
    assert times_shorter("") < 3
