"""Reputation and bans. Pure.

An offence that only a liar can commit weighs much. One that honest peers may commit weighs little,
and all of these together never reach a ban. Faults of the network weigh nothing. Scores decay; a
block is banned for the sum of its peers.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.limits.address_blocks import Block
from swarm.limits.bounded_table import BoundedTable
from swarm.peers.credit import Credit
from swarm.rollouts import GroupId

log = logging.getLogger(__name__)

MUCH: Final[Mapping[Reject, float]] = {
    Reject.BAD_SIGNATURE: 5.0,
    Reject.WRONG_PRODUCER: 5.0,
    Reject.WRONG_RUN: 4.0,
    Reject.MALFORMED: 4.0,
    Reject.OVERSIZE: 4.0,
    Reject.UNASSIGNED_TASK: 4.0,
    Reject.NOT_REQUESTED: 4.0,
    Reject.NOT_A_PUBLISHER: 4.0,
    Reject.WRONG_HASH: 4.0,
    Reject.FALSE_LOGPROBS: 4.0,
    Reject.FORGED_OBSERVATION: 4.0,
    Reject.FORGED_TOOL_RESULT: 4.0,
    Reject.SKIPPED_TURN: 4.0,
    Reject.OTHER_TRANSCRIPT: 4.0,
    Reject.FLOOD: 4.0,
    # CPU time, a hundred times that of right answers; still possible on a slow machine.
    Reject.OVERRUN: 4.0,
}
LITTLE: Final[Mapping[Reject, float]] = {
    Reject.EXPIRED: 0.5,  # a slow link, a slow clock
    Reject.FUTURE: 0.5,  # a fast clock
    Reject.DUPLICATE_TASK: 0.5,  # a restart from an old backup
    Reject.REPUBLISHED: 0.5,  # a restart from an old backup
    Reject.HELD_OUT: 0.5,  # an environment that differs between machines
    Reject.UNVERIFIABLE: 1.0,  # an environment that fails on legal text
    Reject.QUOTA: 0.5,  # our own pool may be too small
}
NOTHING: Final = frozenset({Reject.UNAVAILABLE, Reject.OTHER_RUN, Reject.UNDECIDED})


BAN_AT: Final = 10.0
LITTLE_MAX: Final = 4.0  # cap of the sum of all light offences
HALF_LIFE_S: Final = 600.0
CREDIT: Final = 0.05  # subtracted by each good record
BAN_S: Final = 300.0  # the first ban
BAN_FACTOR: Final = 4.0  # growth with each further ban
BAN_S_MAX: Final = 86_400.0
CLEAN_S: Final = 604_800.0  # after a ban's end; then the next counts as the first
BLOCK_BAN_AT: Final = 35.0  # four peers or more
PEERS_MAX: Final = 4096  # accounts; the least recently used goes first
BANS_MAX: Final = 1024  # remembered, active or ended
BLOCKS_MAX: Final = 1024
PEERS_PER_BLOCK_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Ban:
    """`until` is by the caller's clock; `number` counts a subject's bans from 1."""

    subject: PeerId | Block
    is_block: bool
    why: str
    until: float
    number: int


@dataclass(slots=True)
class _DecayingSum:
    value: float = 0.0
    at: float = 0.0

    def now(self, now: float) -> float:
        faded = float(self.value * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S))
        self.value, self.at = faded, now
        return faded


@dataclass(slots=True)
class _Account:
    much: _DecayingSum = field(default_factory=_DecayingSum)
    little: _DecayingSum = field(default_factory=_DecayingSum)
    offences: Counter[Reject] = field(default_factory=Counter)  # since the last ban


class Reputation:
    def __init__(self) -> None:
        self._accounts: BoundedTable[PeerId, _Account] = BoundedTable(PEERS_MAX)
        self._blocks: BoundedTable[Block, BoundedTable[PeerId, None]] = BoundedTable(BLOCKS_MAX)
        self._bans: OrderedDict[PeerId | Block, Ban] = OrderedDict()

    def record_good(self, peer: PeerId, now: float) -> None:
        account = self._accounts.get(peer)
        if account is None:
            return
        account.much.value = max(0.0, account.much.now(now) - CREDIT)

    def record_offence(
        self, peer: PeerId, reason: Reject, block: Block | None, now: float
    ) -> list[Ban]:
        """The bans that follow. `block`: the peer's block if it may be banned with it."""
        if self.is_banned(peer, now):
            return []  # in flight when the ban began
        account = self._accounts.obtain(peer, _Account, (block or peer,))
        account.offences[reason] += 1
        much, little = MUCH.get(reason), LITTLE.get(reason, 0.0)
        account.little.value = min(LITTLE_MAX, account.little.now(now) + little)
        if much is not None:
            account.much.value = account.much.now(now) + much
            if block is not None:
                peers = self._blocks.obtain(block, lambda: BoundedTable(PEERS_PER_BLOCK_MAX))
                peers.put(peer, None)
        bans: list[Ban] = []
        if self.score(peer, now) >= BAN_AT:
            counts = sorted(account.offences.items(), key=lambda item: (-item[1], item[0]))
            why = ", ".join(f"{reason} {count}" for reason, count in counts)
            bans.append(self._ban(peer, False, why, now))
            account.offences.clear()
            account.much.value = min(BAN_AT, account.much.value)
        if much is not None and block is not None and not self.is_banned(block, now):
            peers = self._blocks[block]
            worth = sum(min(BAN_AT, self._much(each, now)) for each in peers)
            if worth >= BLOCK_BAN_AT:
                bans.append(self._ban(block, True, f"what {len(peers)} peers there did", now))
        return bans

    def score(self, peer: PeerId, now: float) -> float:
        """0.0 without offences."""
        account = self._accounts.get(peer)
        return 0.0 if account is None else account.much.now(now) + account.little.now(now)

    def is_banned(self, subject: PeerId | Block | None, now: float) -> bool:
        ban = self._bans.get(subject) if subject is not None else None
        return ban is not None and now < ban.until

    def bans(self, now: float) -> list[Ban]:
        return [ban for ban in self._bans.values() if now < ban.until]

    def _much(self, peer: PeerId, now: float) -> float:
        account = self._accounts.get(peer)
        return 0.0 if account is None else account.much.now(now)

    def _ban(self, subject: PeerId | Block, is_block: bool, why: str, now: float) -> Ban:
        before = self._bans.get(subject)
        is_repeated = before is not None and now - before.until <= CLEAN_S
        number = before.number + 1 if before is not None and is_repeated else 1
        factor = BAN_FACTOR ** min(number - 1, 30)
        length_s = min(BAN_S_MAX, BAN_S * factor)
        ban = self._bans[subject] = Ban(subject, is_block, why, now + length_s, number)
        self._bans.move_to_end(subject)
        while len(self._bans) > BANS_MAX:
            ended = next((key for key, each in self._bans.items() if each.until <= now), None)
            del self._bans[next(iter(self._bans)) if ended is None else ended]
        return ban


LEDGER_PEERS_MAX = 1024

T = TypeVar("T")


def _ignore(*_: object) -> None:
    pass


@dataclass(slots=True)
class PeerRecord:
    accepted: int = 0
    trained: int = 0
    rejected: Counter[Reject] = field(default_factory=Counter)


class Ledger:
    """Accounts of peers. Those without an accepted group are evicted first; totals stay."""

    def __init__(self, peers_max: int = LEDGER_PEERS_MAX, credit: Credit | None = None) -> None:
        self.credit = credit or Credit()
        self._peers: BoundedTable[PeerId, PeerRecord] = BoundedTable(
            peers_max, rank_of=lambda _, record: int(record.accepted > 0)
        )
        self.on_accept: Callable[[PeerId], None] = _ignore
        self.on_reject: Callable[[PeerId, Reject], None] = _ignore
        self.accepted = 0
        self.rejected: Counter[Reject] = Counter()

    def account(self, peer: PeerId) -> PeerRecord:
        return self._peers.obtain(peer, PeerRecord)

    def train(self, producer: PeerId, group_id: GroupId) -> None:
        """Count a group that goes into an update, and tell its producer by and by."""
        self.account(producer).trained += 1
        self.credit.trained(producer, group_id)

    def accept(self, producer: PeerId) -> None:
        """Count a group that passed every check."""
        self.accepted += 1
        self.account(producer).accepted += 1
        self.on_accept(producer)

    def reject(self, peer: PeerId, reason: Reject) -> None:
        self.rejected[reason] += 1
        log.debug("what %s sent is refused: %s", peer, reason.value)
        self.account(peer).rejected[reason] += 1
        self.on_reject(peer, reason)

    def judge(self, peer: PeerId, check: Callable[..., T], *args: Any) -> T:
        """Run a check; its error counts against the proven signer, else against `peer`."""
        try:
            return check(*args)
        except RemoteProtocolError as error:
            self.reject(PeerId(error.signer or peer), error.reason)
            raise

    def peers(self) -> list[PeerId]:
        return sorted(self._peers)
