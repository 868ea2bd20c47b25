"""One scenario on real sockets and in the simulation."""

import pytest

from swarm.simulation.links import links_of
from tests.netns.worlds import BULK_BYTES, OpenLab, real, simulated


@pytest.mark.netns
def test_both_worlds_run_it_and_neither_is_faster_than_its_links(wan_sockets: OpenLab) -> None:
    links = links_of("cable", 2)
    worlds = [simulated(links, 2), real(wan_sockets, links, 2)]
    assert set(worlds[0]) == set(worlds[1])
    for world in worlds:
        assert len(world["4 KB gossiped"]) == 2
        assert min(world["connect"]) >= 2 * links[0].latency_s
        assert min(world["round trip"]) >= 2 * links[0].latency_s
        assert min(world["4 KB gossiped"]) >= links[0].latency_s
        fastest_s = 2 * links[0].latency_s + BULK_BYTES / links[0].up_bytes_per_s
        assert min(world["1 MB fetched"]) >= fastest_s
