"""Request quotas of peers and address blocks. Pure and bounded. Faster requests are refused
unread; asking on is a flood. The peers of a block share `BLOCK_SHARE` times one peer's rate."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final

from swarm.identity import PeerId
from swarm.limits.address_blocks import Block, block_of, is_public
from swarm.limits.bounded_table import BoundedTable

BUCKETS_MAX: Final = 4096  # evicted ones start full
BLOCK_SHARE: Final = 4.0  # rate of a block, in rates of one peer
RELAYED_SHARE: Final = 8.0  # rate of all relayed peers: 64 honest ones
RELAYED: Final = Block("relayed")  # all relayed peers: they may be one person


def shared_block(ip: str | None) -> Block | None:
    """The block whose quota an address shares. None: a private address, which shares none."""
    block = block_of(ip)
    return RELAYED if block is None else block if is_public(ip) else None


class Kind(StrEnum):
    HELLO = "hello"
    WANT = "want"  # groups
    HAVE = "have"  # holders of groups
    CATCH_UP = "catch_up"  # recent adverts
    PROVIDERS = "providers"  # members of a run
    ADVERT = "advert"  # by gossip: charged to the forwarder
    CONNECT = "connect"
    HEAD = "head"  # of weights, by gossip: charged to the forwarder
    HEADS = "heads"  # believed heads
    MANIFEST = "manifest"
    CHUNK = "chunk"
    LEASE = "lease"
    SUBMISSION = "submission"
    CONTROL = "control"  # reports and plans
    RUN = "run"  # the rules of the run
    DATA = "data"  # manifest and chunks of the run's items
    IDENTIFY = "identify"  # and stream pings, as other libp2p programs send


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` at once, `per_s` in the long run."""

    per_s: float
    burst: float


RATES: Final[Mapping[Kind, Rate]] = {
    Kind.HELLO: Rate(2.0, 20.0),  # one every 5 s
    Kind.WANT: Rate(20.0, 100.0),
    Kind.HAVE: Rate(20.0, 100.0),
    Kind.CATCH_UP: Rate(1.0, 10.0),  # one every 15 s and one per connection
    Kind.PROVIDERS: Rate(1.0, 20.0),  # at most one lookup a minute
    Kind.ADVERT: Rate(200.0, 2_000.0),  # a neighbour forwards those of the whole swarm
    Kind.CONNECT: Rate(1.0, 30.0),
    Kind.HEAD: Rate(10.0, 100.0),  # one per version and per change of plan
    Kind.HEADS: Rate(1.0, 12.0),  # one every 10 s and one per connection
    Kind.MANIFEST: Rate(2.0, 24.0),  # one per version, and some older ones
    Kind.CHUNK: Rate(4_000.0, 40_000.0),  # 64 KiB each at 2 Gbit/s
    Kind.LEASE: Rate(2.0, 20.0),  # one for a few groups, and told retries
    Kind.SUBMISSION: Rate(20.0, 200.0),
    Kind.CONTROL: Rate(2.0, 20.0),  # a report and a plan every few seconds
    Kind.RUN: Rate(1.0, 4.0),  # once per data directory
    Kind.DATA: Rate(8.0, 64.0),  # once per machine: 256 KiB each at 16 Mbit/s
    Kind.IDENTIFY: Rate(1.0, 16.0),  # once per connection, and pings
}
BAD_ADVERT_COST: Final = 8.0  # cost of a bad advert, in good ones


class Verdict(Enum):
    GRANTED = auto()
    REFUSED = auto()
    FLOOD = auto()  # refused a whole burst in a row


@dataclass(slots=True)
class TokenBucket:
    """Refills evenly. Refused requests cost, too, down to a debt of one burst: a flood."""

    rate: Rate
    left: float
    at: float

    def spend(self, cost: float, now: float) -> Verdict:
        refilled = self.left + self.rate.per_s * max(0.0, now - self.at)
        self.left, self.at = min(self.rate.burst, refilled) - cost, now
        if self.left >= 0.0:
            return Verdict.GRANTED
        if self.left > -self.rate.burst:
            return Verdict.REFUSED
        self.left = 0.0  # starts a new flood
        return Verdict.FLOOD


class Quotas:
    def __init__(self, rates: Mapping[Kind, Rate] = RATES) -> None:
        self._rates = rates
        self._buckets: BoundedTable[tuple[str, str], TokenBucket] = BoundedTable(BUCKETS_MAX)
        self.refused: Counter[Kind] = Counter()

    def spend(
        self, kind: Kind, peer: PeerId, block: Block | None, now: float, cost: float = 1.0
    ) -> Verdict:
        """Spend `cost` tokens of a peer, and of `block` if it shares that block's quota."""
        rate = self._rates[kind]
        origin = block or peer
        verdict = self._bucket(kind, peer, rate, now, origin).spend(cost, now)
        if block is not None and verdict is Verdict.GRANTED:
            shares = RELAYED_SHARE if block == RELAYED else BLOCK_SHARE
            shared = Rate(rate.per_s * shares, rate.burst * shares)
            of_block = self._bucket(kind, block, shared, now, origin)
            if of_block.spend(cost, now) is not Verdict.GRANTED:
                verdict = Verdict.REFUSED  # caused by its neighbours, so no flood
        if verdict is not Verdict.GRANTED:
            self.refused[kind] += 1
        return verdict

    def _bucket(
        self, kind: Kind, who: PeerId | Block, rate: Rate, now: float, origin: PeerId | Block
    ) -> TokenBucket:
        return self._buckets.obtain(
            (kind, who), lambda: TokenBucket(rate, rate.burst, now), (origin,)
        )


class ByteBudget:
    """A token bucket of one second's worth that may be overdrawn once, for large records."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self._rate = bytes_per_s
        self._left = bytes_per_s
        self._at = now

    def spend(self, size_bytes: int, now: float) -> float:
        """Returns the seconds to wait before using the bytes."""
        self._refill(now)
        self._left -= size_bytes
        return max(0.0, -self._left / self._rate)

    def is_spent(self, now: float) -> bool:
        self._refill(now)
        return self._left <= 0

    def _refill(self, now: float) -> None:
        self._left = min(self._rate, self._left + self._rate * (now - self._at))
        self._at = now
