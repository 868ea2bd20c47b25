"""Who waits when small work of strangers would fill the event loop. Pure, but for trio's clock.

A byte costs its receiver little; a record, a frame, a stream or an entry that carries next to
nothing costs what thousands of bytes do. Such work is counted in seconds of a core, by constants
that were measured, and put to the account of the peer, of its origin (an address block or a private
address) and of the node. What carries a payload to match is not counted.

Whoever is light goes on at once. Whoever is heavy passes through one lane with all others who are:
one short piece of work at a time, those who used least first, and no more than `LANE_SHARE` of the
time in all. A place in the line grows older, so that nobody waits for ever. Between two pieces
everybody else has a turn, so that an honest peer's request waits for one piece at most, however
many connections are heavy. Where the event loop is late all the same, as others have much to do,
the lane stands still for twice as long.

An account is heavy over its own limit. Where an origin's peers, or a node's origins, are over the
limit together, those are heavy who use more than their equal share of it: identities cost nothing,
so that a limit for each peer alone would be none.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import trio

from swarm.transport.places import Origin

SPAN_S: Final = 1.0  # what is used fades in about this time
PEER_SHARE_MAX: Final = 0.05  # of a core, for small work; seven requests a second take 0.005
ORIGIN_SHARE_MAX: Final = 0.15
NODE_SHARE_MAX: Final = 0.3
LANE_SHARE: Final = 0.5  # of a core, for all who are heavy together
TURN_S: Final = 0.001  # a piece of work after which others have their turn
LATE_TIMES: Final = 2.0  # what the event loop is late, for which the lane stands still
LATE_S_MAX: Final = 0.05  # for which it does so at most
PIECE_S_MAX: Final = 0.002  # more is paid in several pieces
BEHIND_S: Final = 150.0  # for which one waits behind who uses nothing, for each core that one uses
# What many addresses use together may leave each of them less than an honest peer needs. Admitted
# peers that use no more than that are then served before all others but those who wait for so long.
MODEST_SHARE: Final = 0.02  # of a core
MODEST_AHEAD_S: Final = 5.0
NEWCOMER_BEHIND_S: Final = 1.0  # for which whoever has not proved a key waits behind those who have
IDLE_S: Final = 5.0  # an account that nothing was put to for so long is forgotten
ACCOUNTS_MAX: Final = 256  # origins, and peers of one origin; the longest unused is forgotten

RECORD_S: Final = 6e-6  # a small Noise record
FRAME_S: Final = 6e-6  # a Yamux frame that carries little or nothing
STREAM_S: Final = 3e-4  # a stream that is opened, up to an answer
HANDSHAKE_S: Final = 2.5e-3  # the start of one: keys are agreed on, and one signature is made
ADMISSION_S: Final = 2.5e-3  # the rest of it: a muxer, a place, and the streams that we open
ENTRY_S: Final = 3e-6  # one entry of a gossip control message
MESSAGE_S: Final = 2e-4  # a gossip message whose signature is checked
RPC_S: Final = 3e-5  # what comes by gossip, whatever is in it


@dataclass(slots=True)
class _Account:
    """Seconds of work, which fade; of an origin, with the accounts of its peers."""

    value: float = 0.0
    at: float = 0.0
    within: OrderedDict[str, "_Account"] = field(default_factory=OrderedDict)

    def add(self, cost_s: float, now: float) -> float:
        """Put work to the account; what it comes to, as a share of a core."""
        faded = self.value * 0.5 ** (max(0.0, now - self.at) / SPAN_S)
        self.value, self.at = max(0.0, faded + cost_s), now
        return self.value / SPAN_S

    def of(self, who: str, now: float) -> "_Account":
        """An account within this one. Those that nothing is put to are forgotten."""
        account = self.within.get(who)
        if account is None:
            account = self.within[who] = _Account(at=now)
        self.within.move_to_end(who)
        while len(self.within) > 1:
            oldest = next(iter(self.within))
            if len(self.within) <= ACCOUNTS_MAX and now - self.within[oldest].at < IDLE_S:
                break
            del self.within[oldest]
        return account


@dataclass(slots=True)
class MeterFigures:
    """What the meter did since the start."""

    work_s: float = 0.0  # that was counted
    heavy: int = 0  # pieces of work that went through the lane


class WorkMeter:
    """The accounts, and the lane. `run` keeps the lane moving until cancelled."""

    def __init__(self) -> None:
        self._node = _Account()
        self._waiting: list[tuple[float, int, _Turn]] = []
        self._numbers = count()
        self._wake = trio.Event()
        self.figures = MeterFigures()

    async def settle(self, origin: Origin, peer: str, cost_s: float) -> None:
        """Put work to an account, and wait for a turn if it is heavy. `peer` is "" where it is not
        proved yet."""
        share = self.charge(origin, peer, cost_s)
        if share is None:
            await trio.lowlevel.checkpoint()
            return
        self.figures.heavy += 1
        turn = _Turn(cost_s)
        behind_s = share * BEHIND_S
        if not peer:
            behind_s += NEWCOMER_BEHIND_S
        elif share <= MODEST_SHARE:
            behind_s -= MODEST_AHEAD_S
        entry = (trio.current_time() + behind_s, next(self._numbers), turn)
        heapq.heappush(self._waiting, entry)
        self._wake.set()
        try:
            await turn.come.wait()
        except trio.Cancelled:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def charge(self, origin: Origin, peer: str, cost_s: float) -> float | None:
        """Put work to an account, or take it off. Returns the peer's share of a core where it is
        heavy; None where it is light."""
        now = trio.current_time()
        self.figures.work_s += cost_s
        of_node = self._node.add(cost_s, now)
        at_origin = self._node.of(origin, now)
        of_origin = at_origin.add(cost_s, now)
        of_peer = at_origin.of(peer, now).add(cost_s, now)
        peers_share = ORIGIN_SHARE_MAX / len(at_origin.within)
        origins_share = NODE_SHARE_MAX / len(self._node.within)
        is_heavy = (
            of_peer > PEER_SHARE_MAX
            or (of_origin > ORIGIN_SHARE_MAX and of_peer > peers_share)
            or (
                of_node > NODE_SHARE_MAX
                and of_origin > origins_share
                and of_peer > origins_share / len(at_origin.within)
            )
        )
        return of_peer if is_heavy else None

    async def run(self) -> None:
        """Give out turns."""
        while True:
            while not self._waiting:
                self._wake = trio.Event()
                await self._wake.wait()
            _, _, turn = heapq.heappop(self._waiting)
            turn.come.set()
            free_at = trio.current_time() + turn.cost_s / LANE_SHARE
            await trio.sleep_until(free_at)
            late_s = trio.current_time() - free_at  # others have work to do: they go first
            await trio.sleep(min(LATE_TIMES * late_s, LATE_S_MAX))


@dataclass(eq=False, slots=True)
class _Turn:
    """Somebody who waits in the lane."""

    cost_s: float
    come: trio.Event = field(default_factory=trio.Event)


class Payer:
    """One connection's debt, settled in pieces of about `TURN_S`. Without a meter it gives way to
    others and never waits."""

    def __init__(self, meter: WorkMeter | None = None, origin: Origin = "", peer: str = "") -> None:
        self._meter, self._origin, self._peer = meter, origin, peer
        self._debt_s = 0.0

    def owe(self, cost_s: float) -> bool:
        """Add to the debt; whether it is time to pay."""
        self._debt_s += cost_s
        return self._debt_s >= TURN_S

    async def pay(self) -> None:
        """Give way to others, for longer where this peer's account is heavy."""
        debt_s, self._debt_s = self._debt_s, 0.0
        if self._meter is None:
            await trio.lowlevel.checkpoint()
            return
        while debt_s > PIECE_S_MAX:
            await self._meter.settle(self._origin, self._peer, PIECE_S_MAX)
            debt_s -= PIECE_S_MAX
        await self._meter.settle(self._origin, self._peer, debt_s)

    def refund(self, cost_s: float) -> None:
        """Take work off the account that turned out to carry its weight."""
        owed_s = min(cost_s, self._debt_s)
        self._debt_s -= owed_s
        if self._meter is not None:
            self._meter.charge(self._origin, self._peer, owed_s - cost_s)


UNMETERED: Final = Payer()
