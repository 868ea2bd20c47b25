"""Each transport in turn."""

import pytest

from tests.contract.transport_makers import MAKERS, TransportMaker


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.name)
def maker(request: pytest.FixtureRequest) -> TransportMaker:
    made: TransportMaker = request.param
    return made
