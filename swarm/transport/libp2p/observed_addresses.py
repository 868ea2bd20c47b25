"""Reports of peers about our address, and how much of them is believed. Pure: time is passed in.

Peers may lie, and one address easily brings a whole block. So each public address block has one
vote. A report of public peers is believed once `AGREE` blocks agree, and only more votes replace
it. A private address is a vote of its own and enough alone where there are only private peers.
Where public peers exist, they alone count. Reports of an address of the wrong family or scope are
dropped.

Liars in `AGREE` blocks can still have a wrong address believed. The node then keeps its relays
until a peer of a third block has connected.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from swarm.identity import PeerId
from swarm.limits.address_blocks import GLOBAL, Block, block_of, is_public, plain_ip, reach_of_ip
from swarm.limits.bounded_table import BoundedTable

AGREE: Final = 2  # votes that must agree; fewer if there are fewer private peers
VOICES_WANTED: Final = 3  # fresh votes wanted; more if they disagree
VOICES_MAX: Final = 32
ASK_AGAIN_S: Final = 600.0  # before the same block is asked again
FORGET_S: Final = 2 * ASK_AGAIN_S

Voice = PeerId | Block


def voice_of(peer: PeerId, ip: str) -> Voice:
    """The vote of a peer at this address: its block, or its own address if private."""
    return (block_of(ip) if is_public(ip) else None) or peer


@dataclass(frozen=True, slots=True)
class Opinion:
    witness_ip: str
    observed_ip: str
    ports: frozenset[int]  # of our ports, those that the peer reached us at
    keeps_port: bool | None  # the peer sees our source port; None: unknown
    at_s: float


@dataclass(frozen=True, slots=True)
class ReachVerdict:
    """The belief. `reachable` None: too few reports."""

    reachable: bool | None = None
    observed_ip: str | None = None
    likely_ip: str | None = None  # as above, else the most frequent report
    keeps_ports: bool | None = None
    proven: tuple[tuple[str, int], ...] = ()  # (IP, port) at which we were reached
    has_led_here: bool = False  # at least one peer reached us
    needs_relay: bool = False


def _distance(ip: str) -> int:
    return GLOBAL if is_public(ip) else reach_of_ip(ip)


def _family(ip: str) -> int:
    address = plain_ip(ip)
    return 4 if address is None else address.version


class Observations:
    """The votes and the belief that follows; bounded."""

    def __init__(self) -> None:
        self._opinions: BoundedTable[Voice, Opinion] = BoundedTable(VOICES_MAX)
        self._distance = 0
        self._agreed: dict[int, str] = {}  # by family; of the widest scope only
        self._proven: tuple[tuple[str, int], ...] = ()
        self._came_in: set[int] = set()  # families; since `proven` last changed

    def __len__(self) -> int:
        return len(self._opinions)

    def forget(self) -> None:
        """Drop all reports: our network has changed."""
        self._opinions = BoundedTable(VOICES_MAX)
        self._agreed.clear()
        self._came_in.clear()
        self._proven = ()

    def choose_peer(
        self, able: Iterable[tuple[PeerId, str]], now_s: float, rng: Random
    ) -> tuple[PeerId, str] | None:
        """Choose the next peer to ask, at random among those of the widest scope. None: enough is
        known."""
        new = [(peer, ip) for peer, ip in able if not self._is_fresh(voice_of(peer, ip), now_s)]
        if not new:
            return None
        furthest = max(_distance(ip) for _, ip in new)
        fresh = [
            opinion
            for voice, opinion in self._opinions.items()
            if self._is_fresh(voice, now_s) and _distance(opinion.witness_ip) >= furthest
        ]
        said = {(opinion.observed_ip, bool(opinion.ports)) for opinion in self._widest_opinions()}
        agree = len({_family(ip) for ip, _ in said}) == len(said)  # one address per family
        if len(fresh) >= (VOICES_WANTED if agree else VOICES_MAX):
            return None
        by_voice: dict[Voice, list[tuple[PeerId, str]]] = {}
        for peer, ip in new:
            if _distance(ip) == furthest:
                by_voice.setdefault(voice_of(peer, ip), []).append((peer, ip))
        return rng.choice(rng.choice(list(by_voice.values())))

    def _is_fresh(self, voice: Voice, now_s: float) -> bool:
        opinion = self._opinions.get(voice)
        return opinion is not None and now_s - opinion.at_s < ASK_AGAIN_S

    def record(self, peer: PeerId, opinion: Opinion) -> None:
        if is_public(opinion.witness_ip) != is_public(opinion.observed_ip):
            return
        families = {_family(opinion.witness_ip), _family(opinion.observed_ip)}
        if is_public(opinion.witness_ip) and len(families) > 1:
            return  # else a peer with both families would have two votes
        voice = voice_of(peer, opinion.witness_ip)
        self._opinions.put(voice, opinion)

    def record_inbound(self, peer: PeerId, ip: str) -> None:
        """Record an inbound connection. A block that reported success proves nothing new."""
        voice = voice_of(peer, ip)
        opinion = self._opinions.get(voice)
        if is_public(ip) and (opinion is None or not opinion.ports):
            self._came_in.add(_family(ip))

    def _widest_opinions(self) -> list[Opinion]:
        """Reports of peers of the widest scope."""
        if not self._opinions:
            return []
        furthest = max(_distance(o.witness_ip) for o in self._opinions.values())
        return [o for o in self._opinions.values() if _distance(o.witness_ip) == furthest]

    def decide(self, now_s: float) -> ReachVerdict:
        for voice, opinion in list(self._opinions.items()):
            if now_s - opinion.at_s > FORGET_S:
                self._opinions.pop(voice)
        counting = self._widest_opinions()
        if not counting:
            self.forget()
            return ReachVerdict()
        distance = _distance(counting[0].witness_ip)
        if distance != self._distance:
            self._distance = distance
            self._agreed.clear()
        for family in (4, 6):
            self._agree(family, [o for o in counting if _family(o.observed_ip) == family])
        proven = self._prove(counting)
        if proven != self._proven:
            self._proven = proven
            self._came_in.clear()
        reachable: bool | None = None
        if proven:
            reachable = True
        elif sum(not o.ports for o in counting) >= min(AGREE, len(counting)):
            reachable = False
        votes = Counter(o.observed_ip for o in counting)
        agreed = self._agreed.get(4) or self._agreed.get(6)
        kept = [o.keeps_port for o in counting if o.keeps_port is not None]
        return ReachVerdict(
            reachable=reachable,
            observed_ip=agreed,
            likely_ip=agreed or votes.most_common(1)[0][0],
            keeps_ports=2 * sum(kept) > len(kept) if kept else None,
            proven=proven,
            has_led_here=any(o.ports for o in counting),
            needs_relay=(
                reachable is False
                if distance < GLOBAL
                else not any(_family(ip) in self._came_in for ip, _ in proven)
            ),
        )

    def _agree(self, family: int, opinions: list[Opinion]) -> None:
        """Settle on an address of one family if enough votes do, and more than for the last."""
        votes = Counter(opinion.observed_ip for opinion in opinions)
        if not votes:
            return
        ip, count = votes.most_common(1)[0]
        former = self._agreed.get(family)
        if count >= self._enough(len(opinions)) and (former is None or count > votes[former]):
            self._agreed[family] = ip

    def _enough(self, voices: int) -> int:
        return AGREE if self._distance == GLOBAL else min(AGREE, voices)

    def _prove(self, counting: list[Opinion]) -> tuple[tuple[str, int], ...]:
        """Addresses at which enough votes reached us."""
        led = [
            (opinion.observed_ip, port)
            for opinion in counting
            if opinion.observed_ip in self._agreed.values()
            for port in sorted(opinion.ports)
        ]
        enough = self._enough(len(counting))
        return tuple(sorted(each for each, count in Counter(led).items() if count >= enough))
