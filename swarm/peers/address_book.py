"""Addresses of peers: proven ones, kept across restarts, and hearsay."""

import json
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from swarm.identity import PeerId
from swarm.limits.address_blocks import (
    GLOBAL,
    NOWHERE,
    THIS_MACHINE,
    OriginPath,
    path_of,
    reach_of_ip,
)
from swarm.limits.bounded_table import BoundedTable
from swarm.limits.dial_backoff import CIRCUIT, DIAL_AGAIN
from swarm.storage import RunSync
from swarm.wire.messages import ADDRESSES_MAX

BOOK_PEERS_MAX = 512  # peers once connected
HEARSAY_PEERS_MAX = 128
HEARSAY_PER_TELLER_MAX = 32  # per teller or per address block of tellers


@dataclass(slots=True)
class _Entry:
    addresses: tuple[str, ...]
    failures: int = 0
    due_s: float = 0.0  # next dial, by the dialler's clock


def _told_by_one(path: OriginPath) -> int | None:
    return HEARSAY_PER_TELLER_MAX if len(path) == 1 else None


@dataclass(slots=True)
class AddressBook:
    """Peers and their addresses, newest last; bounded, evicting from the largest origin.
    `entries` are peers once connected, saved as one JSON file. `hearsay` are peers that others
    named."""

    path: Path | None = None
    entries: BoundedTable[PeerId, _Entry] = field(
        default_factory=lambda: BoundedTable(BOOK_PEERS_MAX)
    )
    hearsay: BoundedTable[PeerId, _Entry] = field(
        default_factory=lambda: BoundedTable(HEARSAY_PEERS_MAX, limit_of=_told_by_one)
    )
    changed: bool = False  # since it was saved

    @classmethod
    def load(cls, path: Path) -> "AddressBook":
        """Read the book; empty if missing or damaged."""
        book = cls(path)
        try:
            stored = json.loads(path.read_text())
            for peer, addresses in list(stored.items())[-BOOK_PEERS_MAX:]:
                texts = tuple(str(address) for address in addresses[:ADDRESSES_MAX])
                book.entries.put(PeerId(str(peer)), _Entry(texts), _path_of(texts))
        except (OSError, ValueError, AttributeError, TypeError):
            return cls(path)
        return book

    async def save_if_changed(self, run_sync: RunSync) -> None:
        """Save off the event loop if something is new."""
        if self.path is not None and self.changed:
            self.changed = False
            saved = {peer: entry.addresses for peer, entry in self.entries.items()}
            await run_sync(_write, self.path, saved)

    def learn(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        *,
        worked: bool,
        told_by: str = "",
        path: OriginPath | None = None,
    ) -> None:
        """Hearsay never replaces proven addresses. `path`: origin of the connection."""
        entry = _Entry(tuple(addresses[:ADDRESSES_MAX]))
        known = self.entries.get(peer)
        if not worked:
            if known is None and addresses:
                self.hearsay.put(peer, entry, (told_by, *_path_of(entry.addresses)))
            return
        heard = self.hearsay.pop(peer)
        if not entry.addresses:
            entry = known or heard or entry
        if entry.addresses:
            self.changed |= known is None or known.addresses != entry.addresses
            self.entries.put(peer, _Entry(entry.addresses), path or _path_of(entry.addresses))

    def failed(self, peer: PeerId, now_s: float) -> None:
        """Record a failed dial: hearsay is forgotten, others are paused."""
        self.hearsay.pop(peer)
        entry = self.entries.get(peer)
        if entry is not None:
            entry.due_s = now_s + DIAL_AGAIN.after(entry.failures)
            entry.failures += 1

    def draw(
        self,
        number: int,
        excluded: Container[PeerId],
        rng: Random,
        now_s: float,
        may_dial: Callable[[str], bool] = lambda address: True,
    ) -> list[PeerId]:
        """Up to `number` peers that `may_dial`; at most half hearsay if there are others."""
        worked = sorted(
            peer
            for peer, entry in self.entries.items()
            if peer not in excluded
            and entry.due_s <= now_s
            and any(may_dial(address) for address in entry.addresses)
        )
        heard = sorted(
            peer
            for peer, entry in self.hearsay.items()
            if peer not in excluded and any(may_dial(address) for address in entry.addresses)
        )
        from_worked = min(len(worked), number - min(len(heard), number // 2))
        from_heard = min(len(heard), number - from_worked)
        return rng.sample(worked, from_worked) + rng.sample(heard, from_heard)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        entry = self.entries.get(peer) or self.hearsay.get(peer)
        return entry.addresses if entry else ()


def _path_of(addresses: Sequence[str]) -> OriginPath:
    return path_of(ip_in(addresses[0]) if addresses else None)


def addresses_of_peer(peer: PeerId, addresses: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for text in addresses if text.endswith(f"/p2p/{peer}"))[:ADDRESSES_MAX]


def _write(path: Path, saved: Mapping[PeerId, Sequence[str]]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(json.dumps(saved))
        file.flush()
        os.fsync(file.fileno())  # else a power cut may leave an empty file
    temporary.replace(path)


_PEER = r"/p2p/[1-9A-HJ-NP-Za-km-z]{1,64}"
_NUMBERS = re.compile(
    rf"/(?:ip[46]/(?P<ip>[0-9A-Fa-f:.]{{2,45}})/tcp/[0-9]{{1,5}}|memory/[0-9]{{1,9}})"
    rf"(?:{_PEER}(?:{CIRCUIT}[1-9A-HJ-NP-Za-km-z]{{1,64}})?)?"
)
_NAME = re.compile(r"/dns(?:4|6|addr)?/[^/]")


def reach_of(address: str) -> int:
    """Scope of an address, or of its relay. Names are GLOBAL. Spellings other than ours are
    NOWHERE: multiaddr parsers overlook missing slashes."""
    numbers = _NUMBERS.fullmatch(address)
    if numbers is None:
        return GLOBAL if _NAME.match(address) else NOWHERE
    return GLOBAL if numbers["ip"] is None else reach_of_ip(numbers["ip"])


def ip_in(address: str) -> str | None:
    """IP address that is dialled, or the relay's; None: none."""
    numbers = _NUMBERS.fullmatch(address)
    return None if numbers is None else numbers["ip"]


def plausible(addresses: Sequence[str], teller_ip: str | None) -> tuple[str, ...]:
    """Addresses that a peer at this IP (None: on the internet) can know. A remote peer must not
    make us dial our own machine or local network."""
    return not_nearer(addresses, GLOBAL if teller_ip is None else reach_of_ip(teller_ip))


def not_nearer(addresses: Sequence[str], nearest: int) -> tuple[str, ...]:
    """Addresses of at least this scope. Never names: one may stand for any address."""
    numbers = (address for address in addresses if not _NAME.match(address))
    least = max(nearest, THIS_MACHINE)
    return tuple(address for address in numbers if reach_of(address) >= least)
