"""Bounds, predictions and plans of broadcasts, against hand-computed cases."""

import pytest

from swarm.identity import PeerId
from swarm.simulation.profiles import links_of
from swarm.weights.format.topology import (
    FROM_PUBLISHER,
    HOP_LATENCIES,
    PeerLink,
    Plan,
    Strategy,
    bound_s,
    choose,
    predictions,
    relays,
    star,
    swarm_s,
    tree,
    tree_s,
)

MB = 1_000_000


def peers(*ups_mb: float, down_mb: float = 100.0) -> list[PeerLink]:
    return [PeerLink(PeerId(f"p{at:03d}"), up * MB, down_mb * MB) for at, up in enumerate(ups_mb)]


@pytest.mark.parametrize(
    ("up_mb", "links", "bound"),
    [
        (10, peers(10, 10), 10.0),  # the publisher sends everything once
        (100, peers(100, 100, down_mb=5), 20.0),  # the slowest downlink takes everything
        (10, peers(1, 1, 1, 1), 400 / 14),  # all uplinks carry four copies
        (10, [], 0.0),
    ],
)
def test_the_bound_is_the_largest_of_its_three(
    up_mb: float, links: list[PeerLink], bound: float
) -> None:
    assert bound_s(100 * MB, up_mb * MB, links) == pytest.approx(bound)


def test_a_star_shares_the_publishers_uplink() -> None:
    links = peers(1, 1, 1, 1)
    assert tree_s(star(links), 100 * MB, MB, 10 * MB, links, 0.05) == pytest.approx(
        4 * 100 / 10 + 4 * 1 / 10 + HOP_LATENCIES * 0.05
    )


def test_a_chain_is_as_fast_as_its_slowest_inner_uplink_and_delays_a_chunk_a_hop() -> None:
    links = peers(10, 10, 10)
    plan = tree(links, 1, 10 * MB)
    assert plan == Plan(Strategy.CHAIN, tuple(link.peer for link in links), (-1, 0, 1))
    assert tree_s(plan, 100 * MB, MB, 10 * MB, links, 0.05) == pytest.approx(
        10 + 3 * (0.1 + HOP_LATENCIES * 0.05)
    )


def test_a_binary_tree_halves_each_inner_uplink() -> None:
    links = peers(*[10] * 6)
    plan = tree(links, 2, 5 * MB)
    assert plan is not None
    assert plan.parents == (-1, -1, 0, 0, 1, 1)
    assert tree_s(plan, 100 * MB, MB, 10 * MB, links, 0.0) == pytest.approx(20 + 2 * 0.2)


@pytest.mark.parametrize("fanout", [1, 2, 4])
def test_slow_and_relayed_peers_have_no_children(fanout: int) -> None:
    links = [*peers(10, 10, 10, 0.5, 10, 0.5)]
    links[1] = PeerLink(links[1].peer, 50 * MB, 100 * MB, relayed=True)
    plan = tree(links, fanout, 8 * MB / fanout)
    assert plan is not None
    assert set(plan.order) == {link.peer for link in links}
    barred = {links[at].peer for at in (1, 3, 5)}
    inner = {plan.order[parent] for parent in plan.parents if parent != FROM_PUBLISHER}
    assert not inner & barred
    # the guard bites: were they ranked by their uplinks alone, the relayed one would come first
    assert max(links, key=lambda link: link.up_bytes_per_s).peer in barred


def test_no_tree_where_too_few_can_have_children() -> None:
    assert tree(peers(10, 0.1, 0.1, 0.1, 0.1, 0.1), 2, 5 * MB) is None


def test_parents_come_before_their_children() -> None:
    links = peers(9, 8, 7, 6, 5, 0.1, 4, 0.2, 3)
    for fanout in (1, 2, 3):
        plan = tree(links, fanout, 1 * MB)
        assert plan is not None
        assert all(parent < at for at, parent in enumerate(plan.parents))


def test_relays_are_the_peers_that_others_depend_on() -> None:
    names = tuple(link.peer for link in peers(1, 1, 1))
    assert not relays(star(peers(1, 1, 1)))
    assert relays(Plan(Strategy.CHAIN, names, (-1, 0, 1))) == set(names[:2])
    assert relays(Plan(Strategy.TREE, names, (-1, 0, 0))) == {names[0]}
    assert not relays(Plan(Strategy.SWARM))


def test_a_tree_in_which_many_depend_on_each_other_is_not_worth_the_little_that_it_saves() -> None:
    unlike = [
        PeerLink(PeerId(f"p{at:03d}"), link.up_bytes_per_s, link.down_bytes_per_s)
        for at, link in enumerate(links_of("volunteer", 32))
    ]
    found = predictions(200 * MB, 262_144, 125 * MB, unlike, 0.03)
    assert found[0].plan.strategy is Strategy.TREE
    assert len(relays(found[0].plan)) >= 6
    assert choose(200 * MB, 262_144, 125 * MB, unlike, 0.03).plan.strategy is Strategy.SWARM


def test_the_planner_takes_the_fastest_unless_too_many_depend_on_each_other() -> None:
    equal = peers(*[12.5] * 8)
    found = predictions(200 * MB, 256_000, 12.5 * MB, equal, 0.03)
    assert [each.time_s for each in found] == sorted(each.time_s for each in found)
    assert found[0].plan.strategy in (Strategy.CHAIN, Strategy.SWARM)
    assert choose(200 * MB, 256_000, 12.5 * MB, equal, 0.03).plan.strategy is Strategy.SWARM
    assert {each.plan.strategy for each in found} == set(Strategy)


def test_a_long_chain_loses_to_a_swarm_and_a_strong_publisher_wins_with_a_star() -> None:
    many = peers(*[12.5] * 128)
    assert choose(20 * MB, 65_536, 12.5 * MB, many, 0.03).plan.strategy is Strategy.SWARM
    few = peers(1, 1)
    assert choose(20 * MB, 65_536, 1000 * MB, few, 0.03).plan.strategy is Strategy.STAR


def test_without_peers_there_is_nothing_to_plan() -> None:
    assert choose(20 * MB, 65_536, MB, [], 0.03).time_s == 0.0
    assert swarm_s(20 * MB, 65_536, MB, [], 0.03) == 0.0


def test_who_is_not_in_the_plan_takes_from_anybody() -> None:
    links = peers(10, 10)
    plan = star(links)
    publisher = PeerId("publisher")
    assert plan.parent_of(links[0].peer, publisher) == publisher
    assert plan.parent_of(PeerId("stranger"), publisher) is None
