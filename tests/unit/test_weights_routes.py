"""Which way to a version is taken: the fewest bytes, then the fewest steps, and no wrong base."""

from itertools import pairwise
from random import Random

import pytest

from swarm.errors import NoRoute
from swarm.weights.manifest import Artifact, ChunkRef, Manifest
from swarm.weights.version_store import Step, cheapest_route
from tests.weights_samples import chunk_ref, manifest_of

STATES = {version: manifest_of(version).state for version in range(40)}


def full(version: int, size_bytes: int) -> Artifact:
    return Artifact(None, None, (chunk_ref(1000 + version, size_bytes),))


def delta(base: int, version: int, size_bytes: int) -> Artifact:
    ref = chunk_ref(100 * base + version + 10_000, size_bytes)
    return Artifact(base, STATES[base], (ref,))


def known(*manifests: Manifest) -> dict[int, Manifest]:
    return {manifest.version: manifest for manifest in manifests}


def nothing_stored(ref: ChunkRef) -> bool:
    return False


def way(route: tuple[Step, ...]) -> list[tuple[int | None, int]]:
    return [(step.artifact.base_version, step.version) for step in route]


def size_bytes(route: tuple[Step, ...]) -> int:
    return sum(step.artifact.size_bytes for step in route)


LINE = known(
    manifest_of(1, [full(1, 1000)]),
    manifest_of(2, [full(2, 1000), delta(1, 2, 30)]),
    manifest_of(3, [full(3, 1000), delta(2, 3, 30), delta(1, 3, 50)]),
    manifest_of(4, [full(4, 1000), delta(3, 4, 30), delta(2, 4, 70)]),
)


def test_what_is_held_needs_nothing() -> None:
    route = cheapest_route(3, {3: STATES[3]}, LINE, nothing_stored)
    assert route == ()


def test_from_nothing_the_full_snapshot() -> None:
    route = cheapest_route(4, {}, LINE, nothing_stored)
    assert (way(route), size_bytes(route)) == ([(None, 4)], 1000)


@pytest.mark.parametrize(
    ("held", "expected", "missing_bytes"),
    [
        ({3}, [(3, 4)], 30),
        ({2}, [(2, 3), (3, 4)], 60),
        ({1}, [(1, 3), (3, 4)], 80),
        ({1, 3}, [(3, 4)], 30),
    ],
)
def test_the_cheapest_chain(
    held: set[int], expected: list[tuple[int, int]], missing_bytes: int
) -> None:
    route = cheapest_route(4, {each: STATES[each] for each in held}, LINE, nothing_stored)
    assert (way(route), size_bytes(route)) == (expected, missing_bytes)


def test_what_is_stored_is_free() -> None:
    stored = set(delta(2, 4, 70).chunks)
    route = cheapest_route(4, {2: STATES[2]}, LINE, lambda ref: ref in stored)
    assert way(route) == [(2, 4)]


def test_a_full_snapshot_where_every_chain_costs_more() -> None:
    manifests = known(
        manifest_of(2, [full(2, 100), delta(1, 2, 60)]),
        manifest_of(3, [full(3, 100), delta(2, 3, 60)]),
    )
    route = cheapest_route(3, {1: STATES[1]}, manifests, nothing_stored)
    assert (way(route), size_bytes(route)) == ([(None, 3)], 100)


def test_of_equal_costs_the_fewest_steps() -> None:
    """The longer way is found first, for its steps are small to begin with."""
    manifests = known(
        manifest_of(2, [delta(1, 2, 5)]),
        manifest_of(3, [delta(2, 3, 5)]),
        manifest_of(4, [delta(1, 4, 15)]),
        manifest_of(5, [delta(3, 5, 10), delta(4, 5, 5)]),
    )
    route = cheapest_route(5, {1: STATES[1]}, manifests, nothing_stored)
    assert (way(route), size_bytes(route)) == ([(1, 4), (4, 5)], 20)


def test_a_wrong_base_is_not_used() -> None:
    route = cheapest_route(4, {3: bytes(32)}, LINE, nothing_stored)
    assert way(route) == [(None, 4)]


def test_no_way_says_why() -> None:
    manifests = known(manifest_of(4, [delta(3, 4, 30), delta(2, 4, 70)]))
    with pytest.raises(NoRoute) as caught:
        cheapest_route(4, {3: bytes(32)}, manifests, nothing_stored)
    asked = STATES[3].hex()[:12]
    assert f"version 4: base 3 is another here, {'0' * 12} and not {asked}" in str(caught.value)
    assert "base 2 is neither held nor known" in str(caught.value)


def test_a_wrong_version_of_the_wanted_number_is_made_anew() -> None:
    assert way(cheapest_route(4, {4: bytes(32)}, LINE, nothing_stored)) == [(None, 4)]


def test_newer_versions_are_no_way_to_an_older_one() -> None:
    route = cheapest_route(2, {3: STATES[3]}, LINE, nothing_stored)
    assert way(route) == [(None, 2)]


def test_a_peer_that_slept_needs_few_deltas() -> None:
    """With deltas against v-1, v-2, v-4 and v-8, thirty-one versions are five steps."""
    manifests = known(
        *(
            manifest_of(
                version,
                [delta(version - back, version, 10 + back) for back in (1, 2, 4, 8, 16)
                 if version > back],
            )
            for version in range(2, 33)
        )
    )  # fmt: skip
    route = cheapest_route(32, {1: STATES[1]}, manifests, nothing_stored)
    assert len(route) <= 5


def _brute_force(wanted: int, held: set[int], manifests: dict[int, Manifest]) -> float:
    """The least bytes, by trying every chain from the end."""
    if wanted in held:
        return 0
    costs = [
        sum(ref.size_bytes for ref in artifact.chunks)
        + (0 if base is None else _brute_force(base, held, manifests))
        for artifact in manifests[wanted].artifacts
        if (base := artifact.base_version) is None or base in held or base in manifests
    ]
    return min(costs, default=float("inf"))


def test_no_other_chain_is_cheaper() -> None:
    random = Random(7)
    for _ in range(200):
        manifests = {}
        for version in range(1, 8):
            bases = random.sample(range(version), min(version, random.randint(1, 3)))
            artifacts = [delta(base, version, random.randint(1, 60)) for base in bases if base]
            if not artifacts or random.random() < 0.3:
                artifacts.append(full(version, random.randint(40, 120)))
            manifests[version] = manifest_of(version, artifacts)
        held = set(random.sample(range(1, 7), random.randint(0, 3)))
        route = cheapest_route(7, {v: STATES[v] for v in held}, manifests, nothing_stored)
        assert size_bytes(route) == _brute_force(7, held, manifests)
        chain = way(route)
        assert chain[-1][1] == 7
        assert chain[0][0] is None or chain[0][0] in held
        assert all(before[1] == after[0] for before, after in pairwise(chain))
