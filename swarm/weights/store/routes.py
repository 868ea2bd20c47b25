"""The cheapest way to a version: from one that is held, over others, or from nothing. Pure.

What a way costs are the bytes that are still to be fetched for it: chunks in the store are free,
whichever version they came for. Of ways that cost the same, the one with fewer steps is taken, for
each step reads and writes a whole state.
"""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import NoRoute
from swarm.weights.format.manifest import Artifact, ChunkRef, Manifest

_NOTHING = -1  # where the way from nothing begins


@dataclass(frozen=True, slots=True)
class Step:
    """Make `version` of the version that `artifact` is based on."""

    version: int
    artifact: Artifact


@dataclass(frozen=True, slots=True)
class Route:
    """Steps to a version, in order; none where it is held already."""

    steps: tuple[Step, ...]
    missing_bytes: int  # to be fetched
    full_bytes: int  # of the version as a full snapshot, whether one is offered or not
    refused: tuple[str, ...]  # artifacts whose base is missing or another here, one line each


def cheapest_route(
    wanted: int,
    held: Mapping[int, bytes],
    manifests: Mapping[int, Manifest],
    has: Callable[[ChunkRef], bool],
) -> Route:
    """The way to version `wanted` that has the least to fetch.

    Args:
        held: state hashes of the complete versions on this machine.
        manifests: those known, by version; that of `wanted` must be among them.
        has: whether a chunk is in the store.

    Raises:
        NoRoute: nothing that is offered leads there; names each base that is not what is held.
    """
    states = {version: manifest.state for version, manifest in manifests.items()}
    usable = {
        version: state for version, state in held.items() if states.get(version, state) == state
    }
    known = {**states, **usable}
    refused: list[str] = []
    steps_from: dict[int, list[Step]] = {}
    for version, manifest in sorted(manifests.items()):
        for artifact in manifest.artifacts if version <= wanted else ():
            base = _NOTHING if artifact.base_version is None else artifact.base_version
            if artifact.base_version is None or known.get(base) == artifact.base_state:
                steps_from.setdefault(base, []).append(Step(version, artifact))
            fault = _base_fault(artifact, held, known)
            if fault is not None:
                refused.append(f"version {version}: {fault}")
    found = _search(wanted, usable, steps_from, has)
    if found is None:
        why = "; ".join(refused) or "nothing that is offered leads there"
        raise NoRoute(f"no way to version {wanted}: {why}")
    missing_bytes, steps = found
    return Route(steps, missing_bytes, full_bytes(manifests[wanted]), tuple(refused))


def full_bytes(manifest: Manifest) -> int:
    """The bytes of a version for a peer without any: its full artifact, or else its raw size."""
    offered = [each.size_bytes for each in manifest.artifacts if each.base_version is None]
    return min(offered, default=manifest.size_bytes)


def _base_fault(
    artifact: Artifact, held: Mapping[int, bytes], known: Mapping[int, bytes]
) -> str | None:
    """The fault of an artifact's base here; None: it has none."""
    base, asked = artifact.base_version, artifact.base_state
    if base is None or asked is None:
        return None
    there = held.get(base, known.get(base))
    if there is None:
        return f"base {base} is neither held nor known"
    return (
        None
        if there == asked
        else f"base {base} is another here, {there.hex()[:12]} and not {asked.hex()[:12]}"
    )


def _search(
    wanted: int,
    held: Collection[int],
    steps_from: Mapping[int, Sequence[Step]],
    has: Callable[[ChunkRef], bool],
) -> tuple[int, tuple[Step, ...]] | None:
    """Dijkstra's algorithm over versions, by bytes and then by number of steps."""
    ways: dict[int, tuple[Step, ...]] = {}
    queue: list[tuple[int, int, int]] = [(0, 0, version) for version in (_NOTHING, *sorted(held))]
    reached: dict[tuple[int, int, int], tuple[Step, ...]] = dict.fromkeys(queue, ())
    while queue:
        at = heapq.heappop(queue)
        missing_bytes, _, version = at
        if version in ways:
            continue
        ways[version] = steps = reached[at]
        if version == wanted:
            return missing_bytes, steps
        for step in steps_from.get(version, ()):
            more_bytes = sum(ref.size_bytes for ref in step.artifact.chunks if not has(ref))
            following = (missing_bytes + more_bytes, len(steps) + 1, step.version)
            if step.version not in ways and following not in reached:
                reached[following] = (*steps, step)
                heapq.heappush(queue, following)
    return None
