"""Log records of a version on its way to workers. Pure.

To keep the log small, a worker is logged when it begins, at each quarter, and when it uses the
version.
"""

from collections.abc import Collection, Mapping
from typing import Final

from node.observe.records import VersionSpreading
from swarm.identity import PeerId

WATCHED_MAX: Final = 256  # workers of one version; those that come later are counted
MARKS: Final = 4  # in a version's chunks


class SpreadWatch:
    """Remembers what was logged of the newest version."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, version: int) -> None:
        self._version = version
        self._marks: dict[str, int] = {}
        self._using: set[str] = set()
        self._left_out: set[str] = set()

    def poll(
        self, version: int, shares: Mapping[PeerId, float], using: Collection[PeerId]
    ) -> VersionSpreading | None:
        """The progress since the last call, or None. `shares`: of its chunks at each peer, 0 to 1.
        `using`: peers that asked for a lease with this version or a newer one."""
        if version != self._version:
            self._begin(version)
        moved: dict[str, float] = {}
        for peer, share in shares.items():
            mark = _mark(share)
            if mark > self._marks.get(peer, 0) and self._has_room(peer):
                self._marks[peer] = mark
                moved[peer] = round(share, 4)
        new = [each for each in using if each not in self._using and self._has_room(each)]
        self._using.update(new)
        if not moved and not new:
            return None
        return VersionSpreading(version, moved, tuple(sorted(new)), len(self._left_out))

    def _has_room(self, peer: str) -> bool:
        watched = self._marks.keys() | self._using
        if peer in watched or len(watched) < WATCHED_MAX:
            return True
        if len(self._left_out) < WATCHED_MAX:
            self._left_out.add(peer)
        return False


def _mark(share: float) -> int:
    """0: nothing; then one for each quarter begun; above them all: complete."""
    if share <= 0.0:
        return 0
    return MARKS + 1 if share >= 1.0 else 1 + int(MARKS * share)
