"""The choice of chunks to send, to relay and to ask for. Pure: time and randomness are passed in.

A broadcast comes near its bound if the publisher sends no chunk twice before all have left, and
every uplink is busy with chunks that others lack:

- A peer with room on its uplink asks the publisher for a *fresh* chunk, given to nobody else, and
*relays* it to each neighbour that lacks it. Chunks so go out in proportion to uplinks without
measuring them.
- The publisher's spare uplink relays chunks of its own choice.
- Neighbours say what they relay. Chunks that nobody relays, or that are overdue, are *pulled* from
any holder, rarest first. That heals churn, corrupt and slow relays and partial meshes.

Chunks are numbers in an artifact's list; sets of them are integers, bit i for chunk i.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from swarm.identity import PeerId

UNCLAIMED_S = 0.7  # after which a relay of a chunk has said so
OVERDUE_S = 0.5  # least wait before a chunk that a neighbour relays is pulled from another
OVERDUE_LAGS = 3.0  # the same, times the mean lag of relayed chunks or the time of one to all
LAG_S = 0.4  # assumed lag of a relayed chunk before any has come
LAG_WEIGHT = 0.05  # of the newest chunk, in the mean lag
CONFIRM_S = 4.0  # least time for a peer to confirm a chunk that was sent to it
CONFIRM_CYCLES = 4.0  # the same, times the time of one chunk to all
ORPHAN_S = 2.0  # after a chunk was sent to one peer, in which another that asks gets none
COMPLAINTS = 2  # of different peers, after which a relay is given no more
EXAMINED_MAX = 64  # chunks that one choice of a pull looks at
TAKE_OVER_SHARE = 0.25  # of all peers, at least, that lack a chunk which the publisher takes over
NEWS_MAX = 1024  # times at which chunks were first heard of


@dataclass(slots=True)
class Neighbour:
    """The state of one peer."""

    have: int = 0
    pending: int = 0  # it has asked others for
    relaying: int = 0  # got first, and sends to all
    sent: dict[int, float] = field(default_factory=dict)  # by us and not yet confirmed, and when
    distrusted: bool = False  # sent something else than it was asked for

    @property
    def seen(self) -> int:
        """Chunks that need not be sent to it."""
        seen = self.have | self.pending
        for chunk in self.sent:
            seen |= 1 << chunk
        return seen


class Picker:
    """One node's view of one artifact on its way."""

    def __init__(self, chunks: int, have: int, rng: Random, publisher: PeerId | None) -> None:
        """`publisher` is None where this node is: it has all, and hands out fresh chunks."""
        self.cycle_s = 0.0  # what sending one chunk to all neighbours takes here: paces all waits
        self.all = (1 << chunks) - 1
        self.have = have
        self.pending = 0  # pulled, and not there yet
        self.arrived = 0  # verified, and not stored yet
        self.relaying = 0
        self.fresh = 0 if publisher else have  # of the publisher: given to nobody yet
        self.neighbours: dict[PeerId, Neighbour] = {}
        self._publisher = publisher
        self._rng = rng
        self._relayed: dict[int, None] = {}  # what we relay, oldest first
        self._sent_at: dict[int, float] = {}  # of the publisher: when each was last sent
        self._given: dict[int, tuple[PeerId, float]] = {}  # fresh chunks that only one peer has
        self._complaints: dict[PeerId, set[PeerId]] = {}  # about relays, by whom
        self._heard = have  # chunks that somebody has
        self._heard_s: dict[int, float] = {}  # since when, of those that are not here
        self._lag_s = LAG_S  # from hearing of a chunk to having it, in the mean
        self._news: deque[tuple[float, int]] = deque(maxlen=NEWS_MAX)
        self._settled_news: deque[tuple[float, int]] = deque(maxlen=NEWS_MAX)
        self._settled = 0  # heard of long enough to know who relays it
        self._overdue = 0

    def meet(self, peer: PeerId) -> Neighbour:
        return self.neighbours.setdefault(peer, Neighbour())

    def leave(self, peer: PeerId) -> None:
        """Forget a neighbour. Chunks that only it was given are fresh again."""
        self.neighbours.pop(peer, None)
        self._complaints.pop(peer, None)
        self._take_back_from(peer)

    def reclaim(self, now_s: float) -> None:
        """As the publisher, hand out again the chunks that nobody got from their relay."""
        limit_s = max(CONFIRM_S, CONFIRM_CYCLES * self.cycle_s)
        for chunk, (_, at_s) in list(self._given.items()):
            if now_s - at_s >= limit_s:
                self._take_back(chunk)

    def _take_back_from(self, peer: PeerId) -> None:
        for chunk in [chunk for chunk, (relay, _) in self._given.items() if relay == peer]:
            self._take_back(chunk)

    def _take_back(self, chunk: int) -> None:
        relay, _ = self._given.pop(chunk)
        honest = (peer for peer, each in self.neighbours.items() if not each.distrusted)
        others = (self.neighbours[peer].have for peer in honest if peer != relay)
        if not any(have >> chunk & 1 for have in others):
            self.fresh |= 1 << chunk
            self._sent_at.pop(chunk, None)

    def learn(
        self, peer: PeerId, have: int, relaying: int, pending: Iterable[int], now_s: float
    ) -> None:
        """Record what a neighbour says it has, relays, and asked others for."""
        neighbour = self.meet(peer)
        neighbour.pending = sum(1 << chunk for chunk in set(pending)) & self.all
        neighbour.have = have & self.all
        neighbour.relaying = relaying & self.all
        limit_s = max(CONFIRM_S, CONFIRM_CYCLES * self.cycle_s)
        neighbour.sent = {
            chunk: at_s
            for chunk, at_s in neighbour.sent.items()
            if not have >> chunk & 1 and now_s - at_s < limit_s
        }
        if peer != self._publisher:  # that has all tells nothing
            self._hear(neighbour.have, now_s)

    def _hear(self, chunks: int, now_s: float) -> None:
        if new := chunks & ~self._heard:
            self._heard |= new
            self._news.append((now_s, new))
            self._settled_news.append((now_s, new))
            for chunk in members(new & ~self.have):
                self._heard_s[chunk] = now_s

    def got(self, chunk: int, *, relay: bool, now_s: float) -> None:
        """Record a verified chunk. `relay`: it is ours to pass on."""
        bit = 1 << chunk
        self.have |= bit
        self.pending &= ~bit
        if (heard_s := self._heard_s.pop(chunk, None)) is not None:
            self._lag_s += LAG_WEIGHT * (now_s - heard_s - self._lag_s)
        self._hear(bit, now_s)
        if relay:
            self._relay(chunk)

    def failed(self, peer: PeerId, chunk: int) -> None:
        """Record that a chunk for a peer did not leave."""
        if (neighbour := self.neighbours.get(peer)) is not None:
            neighbour.sent.pop(chunk, None)

    def give_up(self, chunk: int) -> None:
        self.pending &= ~(1 << chunk)

    @property
    def complete(self) -> bool:
        return self.have == self.all

    @property
    def here(self) -> int:
        """Chunks that came, stored or not."""
        return self.have | self.arrived

    def missing(self) -> int:
        return self.all & ~self.here

    def copies_owed(self) -> int:
        """The number of transfers that bring all chunks that we relay to all neighbours."""
        owed, needed = 0, 0
        for neighbour in self.neighbours.values():
            if neighbour.distrusted:
                continue
            owed += (self.relaying & ~neighbour.seen).bit_count()
            needed |= self.relaying & ~neighbour.have
        if self._publisher is not None:
            for chunk in members(self.relaying & ~needed):  # everybody has it
                del self._relayed[chunk]
            self.relaying &= needed
        return owed

    def fresh_for(self, peer: PeerId, now_s: float) -> int | None:
        """A chunk for a peer that will relay it; only the publisher has such."""
        neighbour = self.meet(peer)
        chunk = _lowest(self.fresh & ~neighbour.seen)
        if chunk is None or neighbour.distrusted:
            return None
        self._given[chunk] = (peer, now_s)
        return self._send(peer, chunk, now_s)

    def relayed_for(self, peer: PeerId, now_s: float, *, spare: bool) -> int | None:
        """A chunk that we relay and that a peer has lacked for longest.

        `spare`: our uplink is idle, so the publisher may relay one more itself.
        """
        neighbour = self.meet(peer)
        if neighbour.distrusted:
            return None
        seen = neighbour.seen
        lacking = self.relaying & self.have & ~seen
        oldest = None
        if lacking:
            oldest = next(chunk for chunk in self._relayed if lacking >> chunk & 1)
        if oldest is None and spare and (oldest := _lowest(self.fresh & ~seen)) is not None:
            self._relay(oldest)
        return None if oldest is None else self._send(peer, oldest, now_s)

    def take_over(self, copies: float, now_s: float) -> None:
        """As the publisher with nothing fresh, relay what slow relays hold up: the rarest chunks,
        in so many copies."""
        if self.fresh or copies <= 0:
            return
        least_s = max(OVERDUE_S, OVERDUE_LAGS * self.cycle_s)
        late = sum(1 << chunk for chunk, (_, at_s) in self._given.items() if now_s - at_s > least_s)
        haves = [each.have for each in self.neighbours.values() if not each.distrusted]
        lacked = 0
        for have in haves:
            lacked |= self.all & ~have
        lacking = {
            chunk: sum(1 for have in haves if not have >> chunk & 1)
            for chunk in _some(late & lacked & ~self.relaying, EXAMINED_MAX, self._rng)
        }
        for chunk in sorted(lacking, key=lacking.__getitem__, reverse=True):
            copies -= lacking[chunk]
            if copies < 0 or lacking[chunk] < TAKE_OVER_SHARE * len(haves):
                return
            self._relay(chunk)

    def _relay(self, chunk: int) -> None:
        self.relaying |= 1 << chunk
        self._relayed[chunk] = None

    def wanted_by(self, peer: PeerId, chunk: int, now_s: float) -> int | None:
        """A chunk for a peer that asked for it by number, if it is here."""
        if not self.have >> chunk & 1 or self.meet(peer).distrusted:
            return None
        return self._send(peer, chunk, now_s)

    def holds_back(self, peer: PeerId, chunk: int, now_s: float, accused: PeerId | None) -> bool:
        """True if the publisher just gave a chunk to another peer, which relays it.

        Peers may accuse that relay of sending other bytes. If several do, it is given no more, and
        its chunks are handed out again.
        """
        if self._publisher is not None:
            return False
        relay = self._given[chunk][0] if chunk in self._given else None
        if relay is not None and relay == accused != peer:
            complaints = self._complaints.setdefault(relay, set())
            complaints.add(peer)
            if len(complaints) >= min(COMPLAINTS, len(self.neighbours) - 1):
                self.meet(relay).distrusted = True
                self._take_back_from(relay)
        return now_s - self._sent_at.get(chunk, -ORPHAN_S) < ORPHAN_S

    def _send(self, peer: PeerId, chunk: int, now_s: float) -> int:
        self.meet(peer).sent[chunk] = now_s
        self.fresh &= ~(1 << chunk)
        if self._publisher is None:
            self._sent_at[chunk] = now_s
        return chunk

    def pull(
        self, now_s: float, is_free: Callable[[PeerId], bool], *, idle: bool
    ) -> tuple[PeerId, int] | None:
        """A peer and a chunk to ask it for: the rarest one of a holder that is free.

        `idle`: nothing comes in; once every chunk is with somebody, relays are not waited for. The
        publisher is asked for overdue chunks, and for those that nobody else holds any more.
        """
        overdue_s = max(OVERDUE_S, OVERDUE_LAGS * max(self._lag_s, self.cycle_s))
        while self._news and now_s - self._news[0][0] >= overdue_s:
            self._overdue |= self._news.popleft()[1]
        while self._settled_news and now_s - self._settled_news[0][0] >= UNCLAIMED_S:
            self._settled |= self._settled_news.popleft()[1]
        held = relayed = 0
        publisher = self._publisher
        for peer, neighbour in self.neighbours.items():
            if neighbour.distrusted or peer == publisher:
                continue
            held |= neighbour.have
            relayed |= neighbour.relaying
        wanted = self.missing() & ~self.pending
        idle = idle and self._heard == self.all
        from_peers = wanted & held & ((self._settled & ~relayed) | self._overdue | -idle)
        free = [
            (peer, neighbour.have)
            for peer, neighbour in self.neighbours.items()
            if not neighbour.distrusted and peer != publisher and is_free(peer)
        ]
        found = self._rarest(from_peers, free)
        if found is not None or publisher is None or not is_free(publisher):
            return found
        late = _some(self.lost(held) or (wanted & self._overdue & -idle), 1, self._rng)
        return (publisher, late[0]) if late and publisher in self.neighbours else None

    def finished(self) -> set[PeerId]:
        """Neighbours that reported all chunks."""
        return {peer for peer, each in self.neighbours.items() if each.have == self.all}

    def lost(self, held: int) -> int:
        """Chunks that only lying neighbours were to relay. `held`: those that honest ones have."""
        lost = 0
        for neighbour in self.neighbours.values():
            if neighbour.distrusted:
                lost |= neighbour.relaying
        return lost & self.missing() & ~self.pending & ~held

    def relay_of(self, chunk: int, *, distrusted: bool) -> PeerId | None:
        """A neighbour that is to relay a chunk: one that lied, or one that is trusted."""
        for peer, neighbour in self.neighbours.items():
            if neighbour.distrusted == distrusted and neighbour.relaying >> chunk & 1:
                return peer
        return None

    def _rarest(self, wanted: int, free: list[tuple[PeerId, int]]) -> tuple[PeerId, int] | None:
        if not wanted or not free:
            return None
        best: tuple[int, int, list[PeerId]] | None = None
        for chunk in _some(wanted, EXAMINED_MAX, self._rng):
            holders = [peer for peer, have in free if have >> chunk & 1]
            if holders and (best is None or len(holders) < best[0]):
                best = (len(holders), chunk, holders)
        return None if best is None else (self._rng.choice(best[2]), best[1])


def _lowest(chunks: int) -> int | None:
    return (chunks & -chunks).bit_length() - 1 if chunks else None


def members(chunks: int) -> Iterator[int]:
    """The chunks of a set, ascending."""
    while chunks:
        low = chunks & -chunks
        yield low.bit_length() - 1
        chunks ^= low


def _some(chunks: int, most: int, rng: Random) -> list[int]:
    """Up to `most` of the set, drawn at random if there are more."""
    total = chunks.bit_count()
    if total <= most:
        found = list(members(chunks))
        rng.shuffle(found)
        return found
    width = chunks.bit_length()
    drawn: dict[int, None] = {}
    while len(drawn) < most:
        chunk = _lowest(chunks >> (start := rng.randrange(width)))
        if chunk is not None:
            drawn[start + chunk] = None
        if total < 4 * most and len(drawn) >= most // 2:
            break
    return list(drawn)


def to_bytes(chunks: int, count: int) -> bytes:
    """A set of chunks as it travels: bit i of byte j is chunk 8 j + i."""
    return chunks.to_bytes((count + 7) // 8, "little")


def from_bytes(data: bytes) -> int:
    return int.from_bytes(data, "little")


# Pacing of answers: the bytes that may be on their way at once. Pure.

GAIN = 1.5
IDLE_SHARE = 0.5  # of what the link carries in the time of an answer
ANSWERS_MIN = 4  # on their way at once, whatever is measured
MEMORY_S = 10.0
TIME_S = 0.15  # that an answer takes, before one has left
BUCKET_S = 0.25  # over which a rate is measured, at least
BURST_S_MIN = 1e-3  # of a shorter time, after which nothing is on its way
BUCKET_ANSWERS = 3.0  # or so many times what an answer takes: concurrent ones end together
SAMPLES_MAX = 4096
UNSENT_BYTES = 65_536  # that sockets hold of answers which left, about
HELD_BYTES = 32_768  # the same, of one socket
UNSENT_S_MIN = 0.01  # below which a link is too fast for that to matter


class Pacer:
    """Limits the answers on their way. `rate_bytes_per_s`: what was measured earlier, or 0."""

    def __init__(self, rate_bytes_per_s: float = 0.0) -> None:
        self._given = rate_bytes_per_s
        self._out_bytes = 0
        self._out = 0
        self._bucket_since_s = 0.0  # set when the first answer leaves
        self._bucket_bytes = 0
        self._was_full = False
        self._left_s = -math.inf  # when the last answer did
        self._unsent_bytes = 0.0  # that sockets held then, at most
        self._rates: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._times: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)  # ascending

    def has_room(self, size_bytes: int) -> bool:
        """True if an answer of that size may leave."""
        if self._out < ANSWERS_MIN:
            return True
        least_s = self._times[0][1] if self._times else TIME_S
        room = self._out_bytes + size_bytes <= GAIN * self.rate() * least_s
        self._was_full |= not room
        return room

    def is_idle(self, now_s: float) -> bool:
        """True if the uplink will soon have nothing to send."""
        unsent_s = self._unsent_bytes / self.rate() if self.rate() else 0.0
        if unsent_s > UNSENT_S_MIN and now_s - self._left_s < unsent_s:
            return False
        least_s = self._times[0][1] if self._times else TIME_S
        return self._out_bytes <= IDLE_SHARE * self.rate() * least_s

    def rate(self) -> float:
        """The measured rate of the uplink, bytes/s; at first what was given."""
        return max((rate for _, rate in self._rates), default=self._given)

    def start(self, size_bytes: int, now_s: float) -> None:
        if not self._out:  # the time without any says nothing of the link
            self._bucket_since_s, self._bucket_bytes, self._was_full = now_s, 0, False
        if not self._rates:
            self._rates.append((now_s, self._given))
        self._out += 1
        self._out_bytes += size_bytes

    def give_up(self, size_bytes: int) -> None:
        """Stop counting an answer that waits for its reader."""
        self._out -= 1
        self._out_bytes -= size_bytes

    def done(self, size_bytes: int, took_s: float, now_s: float, peers: int = 1) -> None:
        """Record an answer that left. `peers`: the connections that share the uplink."""
        self.give_up(size_bytes)
        gone_bytes = self.rate() * (now_s - self._left_s)  # infinitely many before the first
        left_bytes = max(0.0, self._unsent_bytes - gone_bytes) if self._unsent_bytes else 0.0
        self._unsent_bytes = min(UNSENT_BYTES, left_bytes + size_bytes)
        self._left_s = now_s
        while self._times and self._times[-1][1] >= took_s:
            self._times.pop()
        self._times.append((now_s, took_s))
        while self._times[0][0] < now_s - MEMORY_S:
            self._times.popleft()
        self._bucket_bytes += size_bytes
        width_s = now_s - self._bucket_since_s
        is_whole = not self._out  # nothing was on its way at the start either
        held_bytes = peers * HELD_BYTES
        if width_s >= (BUCKET_S if is_whole else max(BUCKET_S, BUCKET_ANSWERS * took_s)):
            rate = self._bucket_bytes / width_s
        elif is_whole and self._bucket_bytes >= 2 * held_bytes:  # a fast link soon has nothing out
            rate = (self._bucket_bytes - held_bytes) / max(width_s, BURST_S_MIN)
        else:
            return
        # a pause says nothing of the link: only what is more than was known counts then
        if self._was_full or rate > self.rate():
            self._rates.append((now_s, rate))
        while len(self._rates) > 1 and self._rates[0][0] < now_s - MEMORY_S:
            self._rates.popleft()
        self._bucket_since_s, self._bucket_bytes, self._was_full = now_s, 0, False
