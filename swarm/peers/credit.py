"""Credit for own groups that others trained on, and the account of others' groups to tell of.

A node says in its hellos on which groups of others it trained lately. Their maker counts a group
once for each peer that says so, and only a group that it made and sent since its start. That is a
claim of the peer, under its own name. The totals outlive the process in one file.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.identity import PeerId
from swarm.rollouts import GroupId
from swarm.storage import RunSync, write_whole
from swarm.wire.messages import PEER_ID_CHARS_MAX, TRAINED_MAX

MADE_MAX: Final = 1024  # own groups that can still be credited, the newest
TAKERS_PER_GROUP_MAX: Final = 64
TAKERS_MAX: Final = 1024  # peers that are told apart, the newest
TRAINED_KEPT: Final = 512  # groups of others to tell of
OTHERS_TOLD_MAX: Final = 16  # of a hello, groups that the peer did not make


@dataclass(frozen=True, slots=True)
class Credited:
    """Own groups that others trained on, each counted once, and the peers that did."""

    groups: int = 0
    peers: int = 0


def _ignore(*_: object) -> None:
    pass


class Credit:
    """One node's credit. `path`: the file of the totals; None: they end with the process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._trained: deque[tuple[PeerId, GroupId]] = deque(maxlen=TRAINED_KEPT)
        # the takers of each own group; None: it was not sent yet
        self._made: OrderedDict[GroupId, set[PeerId] | None] = OrderedDict()
        self._groups = self._groups_before = 0
        self._takers: OrderedDict[PeerId, int] = OrderedDict()  # with the groups that each took
        self._takers_ever: OrderedDict[PeerId, None] = OrderedDict()
        self._changed = False  # since it was saved
        self.on_told: Callable[[PeerId, Sequence[bytes]], None] = _ignore
        if path is not None:
            self._load(path)

    def _load(self, path: Path) -> None:
        """Read the totals; zero if the file is missing or damaged."""
        with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
            stored = json.loads(path.read_text())
            peers = [PeerId(str(each)[:PEER_ID_CHARS_MAX]) for each in stored["peers"]]
            self._groups_before = max(0, int(stored["groups"]))
            self._takers_ever = OrderedDict.fromkeys(peers[-TAKERS_MAX:])

    async def save_if_changed(self, run_sync: RunSync) -> None:
        """Save the totals off the event loop if they are new; a full disk does without."""
        if self._path is None or not self._changed:
            return
        self._changed = False
        text = json.dumps({"groups": self.ever.groups, "peers": list(self._takers_ever)})
        try:
            await run_sync(write_whole, self._path, text)
        except OSError:
            self._changed = True

    # --- as the taker -------------------------------------------------------------------------

    def trained(self, maker: PeerId, group_id: GroupId) -> None:
        """Note a group of another that goes into an update here."""
        self._trained.append((maker, group_id))

    def told_to(self, peer: PeerId) -> tuple[bytes, ...]:
        """Groups trained on lately, newest first: those of the peer's making, then some others."""
        newest = list(reversed(self._trained))
        own = [group_id for maker, group_id in newest if maker == peer][:TRAINED_MAX]
        others = [group_id for maker, group_id in newest if maker != peer]
        return (*own, *others[: max(0, OTHERS_TOLD_MAX - len(own))])

    # --- as the maker -------------------------------------------------------------------------

    def made(self, group_ids: Iterable[GroupId], *, sent: bool = False) -> None:
        """Remember own groups that are on offer, or already `sent`."""
        for group_id in group_ids:
            self._made[group_id] = set() if sent else None
        while len(self._made) > MADE_MAX:
            self._made.popitem(last=False)

    def sent(self, group_ids: Iterable[GroupId]) -> None:
        """Note groups that went out; those of others are passed over."""
        for group_id in group_ids:
            if self._made.get(group_id, ()) is None:
                self._made[group_id] = set()

    def hear(self, peer: PeerId, group_ids: Sequence[bytes]) -> None:
        """Count the own groups among those that a peer says it trained on."""
        for each in group_ids:
            takers = self._made.get(GroupId(each))
            if takers is None or peer in takers or len(takers) >= TAKERS_PER_GROUP_MAX:
                continue
            self._groups += not takers
            takers.add(peer)
            self._takers[peer] = self._takers.pop(peer, 0) + 1
            self._takers_ever.setdefault(peer)
            self._changed = True
        for known in (self._takers, self._takers_ever):
            while len(known) > TAKERS_MAX:
                known.popitem(last=False)
        self.on_told(peer, group_ids)

    def of(self, peer: PeerId) -> int:
        """Own groups that this peer trained on since the start."""
        return self._takers.get(peer, 0)

    @property
    def session(self) -> Credited:
        """Since the start of the process."""
        return Credited(self._groups, len(self._takers))

    @property
    def ever(self) -> Credited:
        """Since the node's first start."""
        return Credited(self._groups_before + self._groups, len(self._takers_ever))
