"""A pytest fixture: network code in a simulated wide-area network.

  pytest_plugins = ["swarm.simulation.pytest_plugin"]

`wan(main, hosts=3, profile="adsl", seed=7)` runs `await main(world)` and returns its result. The
clock is virtual, and the seed decides jitter, loss and scheduling. A failing test prints its seed.

`world.join(host)` returns the host's `Transport`. Faults are `crash`, `pause`, `clog`, `cut` and
`heal`. Code that `pause` should suspend starts with `with world.on(host): nursery.start_soon(...)`.
No threads, processes or sockets inside.
"""

from collections.abc import Callable
from typing import Any

import pytest

from swarm.simulation.world import run_in_world


@pytest.fixture
def wan() -> Callable[..., Any]:
    return run_in_world
