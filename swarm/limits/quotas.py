"""How often a peer, and its address block, may ask for what costs us something. Pure and bounded.

Every kind of request has a rate. A peer that asks faster is refused before anything of the request
is read; one that goes on asking at that rate floods. The peers of one block share a few times what
one of them may have: a thousand identities of one person come to no more. So do all peers that are
connected through relays, of which nobody can say where they are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final

from swarm.identity import PeerId
from swarm.limits.address_blocks import Block, block_of, is_public
from swarm.limits.bounded_table import BoundedTable

BUCKETS_MAX: Final = 4096  # the least recently used of who has most are forgotten, and full again
BLOCK_SHARE: Final = 4.0  # of the peers of one block together, in shares of one peer
RELAYED_SHARE: Final = 8.0  # of all relayed peers together: what 64 of them ask at an honest pace
RELAYED: Final = Block("relayed")  # whom a relay hides: they may all be one person


def shared_block(ip: str | None) -> Block | None:
    """The block whose quotas a peer at this address shares: its public address block, or `RELAYED`
    where no address is known. None: a private address, behind which there may be a whole swarm."""
    block = block_of(ip)
    return RELAYED if block is None else block if is_public(ip) else None


class Kind(StrEnum):
    """What is asked for, or sent unasked."""

    HELLO = "hello"
    WANT = "want"  # groups
    HAVE = "have"  # who holds which groups
    CATCH_UP = "catch_up"  # recent adverts
    PROVIDERS = "providers"  # who takes part in a run
    ADVERT = "advert"  # by gossip: its forwarder pays
    CONNECT = "connect"
    HEAD = "head"  # of weights, by gossip: its forwarder pays
    HEADS = "heads"  # those that are believed
    MANIFEST = "manifest"
    CHUNK = "chunk"
    LEASE = "lease"
    SUBMISSION = "submission"
    CONTROL = "control"  # reports and plans
    RUN = "run"  # the rules of the run
    DATA = "data"  # the items of the run: their manifest, and chunks
    IDENTIFY = "identify"  # and pings on streams: what other libp2p programs ask of each peer


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` at once, `per_s` in the long run."""

    per_s: float
    burst: float


RATES: Final[Mapping[Kind, Rate]] = {
    Kind.HELLO: Rate(2.0, 20.0),  # one in 5 s is asked of each
    Kind.WANT: Rate(20.0, 100.0),
    Kind.HAVE: Rate(20.0, 100.0),
    Kind.CATCH_UP: Rate(1.0, 10.0),  # one in 15 s and one at each connecting
    Kind.PROVIDERS: Rate(1.0, 20.0),  # a lookup asks each peer once, and once a minute at most
    Kind.ADVERT: Rate(200.0, 2_000.0),  # a neighbour hands over those of the whole swarm
    Kind.CONNECT: Rate(1.0, 30.0),
    Kind.HEAD: Rate(10.0, 100.0),  # one for each version, and one where a plan changes
    Kind.HEADS: Rate(1.0, 12.0),  # one in 10 s and one at each connecting
    Kind.MANIFEST: Rate(2.0, 24.0),  # one for each version, and some of older ones
    Kind.CHUNK: Rate(4_000.0, 40_000.0),  # 64 KiB each at 2 Gbit/s
    Kind.LEASE: Rate(2.0, 20.0),  # one for each few groups, and retries as they are told
    Kind.SUBMISSION: Rate(20.0, 200.0),
    Kind.CONTROL: Rate(2.0, 20.0),  # a report and a plan every few seconds
    Kind.RUN: Rate(1.0, 4.0),  # once in the life of a data directory
    Kind.DATA: Rate(8.0, 64.0),  # once in the life of a machine: 256 KiB each at 16 Mbit/s
    Kind.IDENTIFY: Rate(1.0, 16.0),  # once for each connection, and a ping in some seconds
}
BAD_ADVERT_COST: Final = 8.0  # a bad advert costs its forwarder as much as so many good ones


class Verdict(Enum):
    """What comes of asking."""

    GRANTED = auto()
    REFUSED = auto()
    FLOOD = auto()  # refused, and the peer went on asking for a whole burst's worth


@dataclass(slots=True)
class TokenBucket:
    """Refills evenly. Asking in vain costs too, down to a debt of one burst; that is a flood."""

    rate: Rate
    left: float
    at: float

    def take(self, cost: float, now: float) -> Verdict:
        """Ask for `cost` tokens."""
        refilled = self.left + self.rate.per_s * max(0.0, now - self.at)
        self.left, self.at = min(self.rate.burst, refilled) - cost, now
        if self.left >= 0.0:
            return Verdict.GRANTED
        if self.left > -self.rate.burst:
            return Verdict.REFUSED
        self.left = 0.0  # the next flood is a new one
        return Verdict.FLOOD


class Quotas:
    """The buckets of all peers and blocks."""

    def __init__(
        self, rates: Mapping[Kind, Rate] = RATES, block_share: float = BLOCK_SHARE
    ) -> None:
        self._rates = rates
        self._block_share = block_share
        self._buckets: BoundedTable[tuple[Kind, PeerId | Block], TokenBucket] = BoundedTable(
            BUCKETS_MAX
        )
        self.refused: Counter[Kind] = Counter()

    def take(
        self, kind: Kind, peer: PeerId, block: Block | None, now: float, cost: float = 1.0
    ) -> Verdict:
        """Ask on behalf of a peer; `block` is its where it shares a quota with its neighbours."""
        rate = self._rates[kind]
        origin = block or peer
        verdict = self._bucket(kind, peer, rate, now, origin).take(cost, now)
        if block is not None and verdict is Verdict.GRANTED:
            shares = RELAYED_SHARE if block == RELAYED else self._block_share
            shared = Rate(rate.per_s * shares, rate.burst * shares)
            of_block = self._bucket(kind, block, shared, now, origin)
            if of_block.take(cost, now) is not Verdict.GRANTED:
                verdict = Verdict.REFUSED  # by its neighbours' doing: never held against a peer
        if verdict is not Verdict.GRANTED:
            self.refused[kind] += 1
        return verdict

    def _bucket(
        self, kind: Kind, who: PeerId | Block, rate: Rate, now: float, origin: PeerId | Block
    ) -> TokenBucket:
        return self._buckets.obtain(
            (kind, who), lambda: TokenBucket(rate, rate.burst, now), (origin,)
        )
