"""Who is to be left alone, and for how long. Pure: the time, of any clock in seconds, is passed in.

An offence weighs by what it proves. What only a liar can produce weighs much. What happens to an
honest peer too, over a slow link, with a wrong clock, or after a restart from an old backup,
weighs little, and all of that together stays under what a ban takes. What is the network's fault,
or nobody's, weighs nothing.

A standing fades by half every `half_life_s`. Good records lower it too, but so slowly that a few
bad ones outweigh many, and never below zero: nobody saves up for a lie.

A block of addresses is banned for what its peers did together: each counts at most as much as
gets one peer banned, so that no single one can take its neighbours with it.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.errors import Reject
from swarm.identity import PeerId
from swarm.limits.address_blocks import Block
from swarm.limits.bounded_table import BoundedTable

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
    # Of CPU time, so that no other load on this machine has a part in it, and a hundred times what
    # right answers take. One may still happen, with an odd environment on a slow machine.
    Reject.OVERRUN: 4.0,
}
LITTLE: Final[Mapping[Reject, float]] = {
    Reject.EXPIRED: 0.5,  # a slow link, a slow clock
    Reject.FUTURE: 0.5,  # a fast clock
    Reject.DUPLICATE_TASK: 0.5,  # a restart from an old backup
    Reject.REPUBLISHED: 0.5,  # a restart from an old backup
    Reject.HELD_OUT: 0.5,  # an environment that does not make the same problem everywhere
    Reject.UNVERIFIABLE: 1.0,  # an environment that fails on a text that a policy may well write
    Reject.QUOTA: 0.5,  # our own pool may be too small
}
NOTHING: Final = frozenset({Reject.UNAVAILABLE, Reject.OTHER_RUN, Reject.UNDECIDED})


@dataclass(frozen=True, slots=True)
class ReputationRules:
    """How much is too much, and what follows."""

    ban_at: float = 10.0
    little_max: float = 4.0  # to which all offences of little weight together add up
    half_life_s: float = 600.0
    credit: float = 0.05  # taken off a standing by each good record
    ban_s: float = 300.0  # the first ban
    ban_factor: float = 4.0  # by which each further one is longer
    ban_s_max: float = 86_400.0
    clean_s: float = 604_800.0  # after a ban's end, until the next one counts as the first again
    block_ban_at: float = 35.0  # takes four peers or more
    peers_max: int = 4096  # accounts, the least recently touched forgotten first
    bans_max: int = 1024  # remembered, the running ones and those that ended
    blocks_max: int = 1024
    peers_per_block_max: int = 64
    much: Mapping[Reject, float] = field(default_factory=lambda: MUCH)
    little: Mapping[Reject, float] = field(default_factory=lambda: LITTLE)


RULES: Final = ReputationRules()


@dataclass(frozen=True, slots=True)
class Ban:
    """Who is banned, why, and until when by the caller's clock. `number`: of its bans, from 1."""

    subject: PeerId | Block
    is_block: bool
    why: str
    until: float
    number: int


@dataclass(slots=True)
class _Gauge:
    """A sum that fades."""

    value: float = 0.0
    at: float = 0.0

    def now(self, now: float, half_life_s: float) -> float:
        faded = float(self.value * 0.5 ** (max(0.0, now - self.at) / half_life_s))
        self.value, self.at = faded, now
        return faded


@dataclass(slots=True)
class _Account:
    much: _Gauge = field(default_factory=_Gauge)
    little: _Gauge = field(default_factory=_Gauge)
    offences: Counter[Reject] = field(default_factory=Counter)  # since the last ban


class Reputation:
    """Standings and bans of peers and of address blocks; bounded."""

    def __init__(self, rules: ReputationRules = RULES) -> None:
        self._rules = rules
        self._accounts: BoundedTable[PeerId, _Account] = BoundedTable(rules.peers_max)
        self._blocks: BoundedTable[Block, BoundedTable[PeerId, None]] = BoundedTable(
            rules.blocks_max
        )
        self._bans: OrderedDict[PeerId | Block, Ban] = OrderedDict()

    def good(self, peer: PeerId, now: float) -> None:
        """Note a good record; one of a peer without a fault changes nothing."""
        account = self._accounts.get(peer)
        if account is None:
            return
        standing = account.much.now(now, self._rules.half_life_s)
        account.much.value = max(0.0, standing - self._rules.credit)

    def bad(self, peer: PeerId, reason: Reject, block: Block | None, now: float) -> list[Ban]:
        """Note an offence. Returns the bans that follow from it, the peer's own first.

        `block` is the peer's where it may be held against its neighbours; else None.
        """
        if self.is_banned(peer, now):
            return []  # what was on its way when the ban came
        account = self._accounts.obtain(peer, _Account, (block or peer,))
        account.offences[reason] += 1
        much, little = self._rules.much.get(reason), self._rules.little.get(reason)
        half_life_s = self._rules.half_life_s
        if little is not None:
            account.little.value = min(
                self._rules.little_max, account.little.now(now, half_life_s) + little
            )
        if much is not None:
            account.much.value = account.much.now(now, half_life_s) + much
            if block is not None:
                self._join_block(peer, block)
        bans: list[Ban] = []
        if self.standing(peer, now) >= self._rules.ban_at:
            bans.append(self._ban(peer, False, _counts(account.offences), now))
            account.offences.clear()
            account.much.value = min(self._rules.ban_at, account.much.value)
        if much is not None and block is not None and not self.is_banned(block, now):
            peers = self._blocks[block]
            worth = sum(min(self._rules.ban_at, self._much(each, now)) for each in peers)
            if worth >= self._rules.block_ban_at:
                bans.append(self._ban(block, True, f"what {len(peers)} peers there did", now))
        return bans

    def standing(self, peer: PeerId, now: float) -> float:
        """How much there is against a peer; 0.0 for one without a fault."""
        account = self._accounts.get(peer)
        if account is None:
            return 0.0
        half_life_s = self._rules.half_life_s
        little = min(self._rules.little_max, account.little.now(now, half_life_s))
        return account.much.now(now, half_life_s) + little

    def is_banned(self, subject: PeerId | Block | None, now: float) -> bool:
        """Whether a ban on a peer or on a block runs now."""
        ban = self._bans.get(subject) if subject is not None else None
        return ban is not None and now < ban.until

    def bans(self, now: float) -> list[Ban]:
        """The bans that run now, oldest first."""
        return [ban for ban in self._bans.values() if now < ban.until]

    def _much(self, peer: PeerId, now: float) -> float:
        account = self._accounts.get(peer)
        return 0.0 if account is None else account.much.now(now, self._rules.half_life_s)

    def _join_block(self, peer: PeerId, block: Block) -> None:
        most = self._rules.peers_per_block_max
        self._blocks.obtain(block, lambda: BoundedTable(most)).put(peer, None)

    def _ban(self, subject: PeerId | Block, is_block: bool, why: str, now: float) -> Ban:
        before = self._bans.get(subject)
        is_repeated = before is not None and now - before.until <= self._rules.clean_s
        number = before.number + 1 if before is not None and is_repeated else 1
        factor = self._rules.ban_factor ** min(number - 1, 30)
        length_s = min(self._rules.ban_s_max, self._rules.ban_s * factor)
        ban = self._bans[subject] = Ban(subject, is_block, why, now + length_s, number)
        self._bans.move_to_end(subject)
        while len(self._bans) > self._rules.bans_max:
            ended = next((key for key, each in self._bans.items() if each.until <= now), None)
            del self._bans[next(iter(self._bans)) if ended is None else ended]
        return ban


def _counts(offences: Counter[Reject]) -> str:
    ordered = sorted(offences.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered)
