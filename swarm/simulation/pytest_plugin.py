"""A pytest fixture that puts a test's own network code into a simulated wide-area network.

    pytest_plugins = ["swarm.simulation.pytest_plugin"]

`wan(main, hosts=3, profile="adsl", seed=7)` runs `await main(world)` and returns what it returns.
The clock is virtual, so an hour of waiting costs nothing, and the seed decides everything: jitter,
loss, and which of two things that happen at one moment comes first. A test that fails says its
seed.

`world.join(host)` puts a host on the network and gives its `Transport`. Then things may go wrong:
`crash`, `pause`, `clog`, `cut` and `heal`. Code that a pause is to hold up is started with
`with world.on(host): nursery.start_soon(...)`. No threads, processes or sockets inside.
"""

import pytest

from swarm.simulation.wan import Wan


@pytest.fixture
def wan() -> Wan:
    """Runs network code over simulated links: see `Wan`."""
    return Wan()
