"""The heads that are believed: the newest of each policy, and older versions' on offer. Pure, but
for the files that keep them across restarts.

A head of an older version changes nothing that is served. It is kept because a peer that slept
through some versions may reach the newest one cheapest by way of others.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swarm.errors import Reject, RemoteProtocolError, StorageFailed
from swarm.identity import PeerId
from swarm.weights.format.manifest_wire import is_newer_head
from swarm.wire import codec
from swarm.wire.messages import HEADS_PER_REPLY_MAX, HeadBody

POLICIES_MAX: Final = 8  # of one run that are kept track of; others change nothing
HEADS_KEPT_MAX: Final = 16  # of one policy
SUFFIX: Final = ".head"


@dataclass(frozen=True, slots=True)
class HeadRules:
    """The publishers whose heads count, and the lead that their clocks may have."""

    run_id: str
    publishers: frozenset[PeerId]
    clock_skew_s: float = 120.0


@dataclass(slots=True)
class _Line:
    """The versions of one policy."""

    newest: HeadBody
    heads: dict[int, HeadBody] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)


class HeadTable:
    """The heads of one run."""

    def __init__(self, rules: HeadRules, now_s: Callable[[], float]) -> None:
        self._rules = rules
        self._now_s = now_s
        self._lines: dict[str, _Line] = {}

    def hear(self, record: bytes) -> tuple[HeadBody, bool]:
        """Judge a signed head, keep it if it is to be believed, and say whether it is the newest.

        Raises:
            RemoteProtocolError: as `codec.decode_head` and `is_newer_head`; REPUBLISHED also for
                other weights under the number of an older version that is known.
        """
        head = codec.decode_head(record)
        line = self._lines.get(head.policy)
        is_newer = is_newer_head(
            head,
            line.newest if line else None,
            run_id=self._rules.run_id,
            publishers=self._rules.publishers,
            now_s=self._now_s(),
            skew_s=self._rules.clock_skew_s,
        )
        if line is None:
            if len(self._lines) >= POLICIES_MAX:
                return head, False
            line = self._lines[head.policy] = _Line(head)
        known = line.heads.get(head.version)
        if known is not None and known.root != head.root:
            raise RemoteProtocolError(
                Reject.REPUBLISHED, f"other weights as version {head.version}", head.publisher
            )
        if is_newer:
            line.newest = head
        if known is None:
            line.heads[head.version], line.records[head.version] = head, record
            for version in sorted(line.heads)[:-HEADS_KEPT_MAX]:
                del line.heads[version], line.records[version]
        return head, is_newer

    def newest(self, policy: str) -> HeadBody | None:
        """The head of a policy's newest version."""
        line = self._lines.get(policy)
        return line.newest if line else None

    def of(self, policy: str, version: int) -> HeadBody | None:
        """The head of a version, if it is kept."""
        line = self._lines.get(policy)
        return line.heads.get(version) if line else None

    def older(self, policy: str) -> tuple[HeadBody, ...]:
        """The heads of a policy but the newest, newest first."""
        line = self._lines.get(policy)
        return tuple(line.heads[version] for version in sorted(line.heads)[-2::-1]) if line else ()

    def record(self, policy: str, version: int) -> bytes | None:
        """A head as its publisher signed it."""
        line = self._lines.get(policy)
        return line.records.get(version) if line else None

    def records(self, policy: str, versions: Collection[int]) -> tuple[bytes, ...]:
        """The heads to send to a peer, as many as a reply holds: the newest of each policy, then
        those of these versions of one policy, newest first."""
        told = [line.records[line.newest.version] for line in self._lines.values()]
        line = self._lines.get(policy)
        if line is not None:
            told += [
                line.records[version]
                for version in sorted(line.records, reverse=True)
                if version in versions and version != line.newest.version
            ]
        return tuple(told[:HEADS_PER_REPLY_MAX])


# --- kept across restarts ----------------------------------------------------------------------


def save_head(directory: Path, version: int, record: bytes, keep: Collection[int]) -> None:
    """Keep the head of a version that is here, and those of the versions in `keep`; no others.

    Raises:
        StorageFailed: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"{version}{SUFFIX}.partial"
        temporary.write_bytes(record)
        temporary.replace(directory / f"{version}{SUFFIX}")
        for path in directory.glob(f"*{SUFFIX}"):
            if path.stem not in {str(version), *map(str, keep)}:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageFailed(f"weights: {directory}: {error.strerror}") from None


def load_heads(directory: Path) -> tuple[bytes, ...]:
    """The records that were saved, in no order; they are judged as if a peer had sent them."""
    records = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with suppress(OSError):  # it is heard of again from a peer
            records.append(path.read_bytes())
    return tuple(records)
