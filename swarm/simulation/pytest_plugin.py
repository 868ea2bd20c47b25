"""The pytest fixture `wan`: network code in a simulated wide-area network, by
docs/simulation.md."""

from collections.abc import Callable
from typing import Any

import pytest

from swarm.simulation.world import run_in_world


@pytest.fixture
def wan() -> Callable[..., Any]:
    return run_in_world
