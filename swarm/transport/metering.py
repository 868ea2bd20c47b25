"""CPU time that a peer's small messages cost, and who waits when it is too much. Pure, on trio's
clock.

Tiny records, frames, streams and entries cost the receiver far more than their bytes. Their cost,
in seconds of one core by measured constants, is charged to the peer, to its origin (address block
or private address) and to the node. Large payloads are not charged.

Light accounts go on at once. Heavy ones queue in one lane, lowest use first, with at most
`LANE_SHARE` of the time; waiting raises the priority. Between two pieces of work all other tasks
run. When the event loop is late, the lane pauses for twice as long.

An account is heavy beyond its own limit. If an origin or the node is over its limit, the accounts
above their equal share of it are heavy, because identities cost nothing.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import trio

from swarm.transport.connection_slots import Origin

SPAN_S: Final = 1.0  # half-life of the charges
PEER_SHARE_MAX: Final = 0.05  # of a core; seven requests a second take 0.005
ORIGIN_SHARE_MAX: Final = 0.15
NODE_SHARE_MAX: Final = 0.3
LANE_SHARE: Final = 0.5  # of a core, for all heavy accounts together
TURN_S: Final = 0.001  # work after which other tasks run
LATE_FACTOR: Final = 2.0  # lane pause as a multiple of the loop's delay
LATE_S_MAX: Final = 0.05  # longest lane pause
PIECE_S_MAX: Final = 0.002  # larger debts are paid in pieces
PENALTY_S_PER_CORE: Final = 150.0  # queue penalty in seconds per core used
# Admitted peers below this use are served first, but not before those that have waited for
# `MODEST_BONUS_S`. Else many addresses together could leave an honest peer too little.
MODEST_SHARE: Final = 0.02  # of a core
MODEST_BONUS_S: Final = 5.0
NEWCOMER_PENALTY_S: Final = 1.0  # queue penalty before the handshake proves a key
IDLE_S: Final = 5.0  # unused accounts are forgotten
ACCOUNTS_MAX: Final = 256  # origins, and peers per origin

RECORD_S: Final = 6e-6  # a small Noise record
FRAME_S: Final = 6e-6  # a Yamux frame with little or no data
STREAM_S: Final = 3e-4  # opening a stream and answering it
HANDSHAKE_S: Final = 2.5e-3  # key agreement and one signature
ADMISSION_S: Final = 2.5e-3  # muxer, slot, and the streams that we open
ENTRY_S: Final = 3e-6  # an entry of a gossip control message
MESSAGE_S: Final = 2e-4  # a gossip message, with its signature check
RPC_S: Final = 3e-5  # any gossip RPC


@dataclass(slots=True)
class _Account:
    """Decaying seconds of work; an origin's account holds those of its peers."""

    value: float = 0.0
    at: float = 0.0
    within: OrderedDict[str, "_Account"] = field(default_factory=OrderedDict)

    def add(self, cost_s: float, now: float) -> float:
        """Add work. Returns the total as a share of one core."""
        faded = self.value * 0.5 ** (max(0.0, now - self.at) / SPAN_S)
        self.value, self.at = max(0.0, faded + cost_s), now
        return self.value / SPAN_S

    def member(self, who: str, now: float) -> "_Account":
        """The account of a member. Idle ones are forgotten."""
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


class WorkMeter:
    """All accounts and the lane. `run` drives the lane until cancelled."""

    def __init__(self) -> None:
        self._node = _Account()
        # by rank: when the turn is due, a number, the cost in seconds, the turn
        self._waiting: list[tuple[float, int, float, trio.Event]] = []
        self._numbers = count()
        self._wake = trio.Event()

    async def settle(self, origin: Origin, peer: str, cost_s: float) -> None:
        """Charge work; a heavy account waits for its turn. `peer` is "" until its key is proved."""
        share = self.charge(origin, peer, cost_s)
        if share is None:
            await trio.lowlevel.checkpoint()
            return
        penalty_s = share * PENALTY_S_PER_CORE
        if not peer:
            penalty_s += NEWCOMER_PENALTY_S
        elif share <= MODEST_SHARE:
            penalty_s -= MODEST_BONUS_S
        turn = trio.Event()
        entry = (trio.current_time() + penalty_s, next(self._numbers), cost_s, turn)
        heapq.heappush(self._waiting, entry)
        self._wake.set()
        try:
            await turn.wait()
        except trio.Cancelled:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def charge(self, origin: Origin, peer: str, cost_s: float) -> float | None:
        """Charge or refund work. Returns the peer's share of a core if it is heavy, else None."""
        now = trio.current_time()
        of_node = self._node.add(cost_s, now)
        at_origin = self._node.member(origin, now)
        of_origin = at_origin.add(cost_s, now)
        addresses_of_peer = at_origin.member(peer, now).add(cost_s, now)
        peers_share = ORIGIN_SHARE_MAX / len(at_origin.within)
        origins_share = NODE_SHARE_MAX / len(self._node.within)
        is_heavy = (
            addresses_of_peer > PEER_SHARE_MAX
            or (of_origin > ORIGIN_SHARE_MAX and addresses_of_peer > peers_share)
            or (
                of_node > NODE_SHARE_MAX
                and of_origin > origins_share
                and addresses_of_peer > origins_share / len(at_origin.within)
            )
        )
        return addresses_of_peer if is_heavy else None

    async def run(self) -> None:
        while True:
            while not self._waiting:
                self._wake = trio.Event()
                await self._wake.wait()
            _, _, cost_s, turn = heapq.heappop(self._waiting)
            turn.set()
            free_at = trio.current_time() + cost_s / LANE_SHARE
            await trio.sleep_until(free_at)
            late_s = trio.current_time() - free_at  # others have work to do: they go first
            await trio.sleep(min(LATE_FACTOR * late_s, LATE_S_MAX))


class Payer:
    """Debt of one connection, paid in pieces of about `TURN_S`. Without a meter it only yields to
    other tasks."""

    def __init__(self, meter: WorkMeter | None = None, origin: Origin = "", peer: str = "") -> None:
        self._meter, self._origin, self._peer = meter, origin, peer
        self._debt_s = 0.0

    def owe(self, cost_s: float) -> bool:
        """Add to the debt. Returns True when it is time to pay."""
        self._debt_s += cost_s
        return self._debt_s >= TURN_S

    async def pay(self) -> None:
        """Yield to other tasks, for longer if this peer's account is heavy."""
        debt_s, self._debt_s = self._debt_s, 0.0
        if self._meter is None:
            await trio.lowlevel.checkpoint()
            return
        while debt_s > PIECE_S_MAX:
            await self._meter.settle(self._origin, self._peer, PIECE_S_MAX)
            debt_s -= PIECE_S_MAX
        await self._meter.settle(self._origin, self._peer, debt_s)

    def refund(self, cost_s: float) -> None:
        """Take back a charge for work that carried enough data."""
        owed_s = min(cost_s, self._debt_s)
        self._debt_s -= owed_s
        if self._meter is not None:
            self._meter.charge(self._origin, self._peer, owed_s - cost_s)


UNMETERED: Final = Payer()
