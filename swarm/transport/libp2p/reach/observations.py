"""What peers say of our own address, and how much of it is believed. Pure: the time is passed in.

Whoever is asked may lie, and whoever has one address has a whole block of them. So each address
block has one voice. What public peers say is believed when `AGREE` voices say the same, and what is
believed gives way only to what more voices say. A private or loopback address is a voice of its
own, and alone enough where no other can be asked: on one machine, in one home, in a laboratory.

Public peers know more of how the world sees us than our neighbours do: where there are any, they
alone count. A public peer sees public addresses of the family over which we talk to it, and a
neighbour sees private ones; anything else comes from a liar, or from behind a router of its own,
and is of no use.

Liars of `AGREE` blocks can still have a wrong address believed. It costs little: a node behind it
keeps its relays until somebody from a third block has connected.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from swarm.identity import PeerId
from swarm.limits.address_blocks import GLOBAL, Block, block_of, is_public, plain_ip, reach_of_ip
from swarm.limits.bounded_table import BoundedTable

AGREE: Final = 2  # voices that must say the same; of private ones as many as there are, up to that
VOICES_WANTED: Final = 3  # fresh ones, where these are of one mind; else more are asked
VOICES_MAX: Final = 32
ASK_AGAIN_S: Final = 600.0  # the same voice
FORGET_S: Final = 2 * ASK_AGAIN_S

Voice = PeerId | Block


def voice_of(peer: PeerId, ip: str) -> Voice:
    """In whose name a peer at this IP address speaks: its block's, or its own if it is private."""
    return (block_of(ip) if is_public(ip) else None) or peer


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one peer says of us."""

    witness_ip: str
    observed_ip: str
    ports: frozenset[int]  # of ours, that led to us
    keeps_port: bool | None  # whether it sees the port that we dialled from; None: unknown
    at_s: float


@dataclass(frozen=True, slots=True)
class ReachVerdict:
    """What is believed. `reachable` None: there is too little to go by."""

    reachable: bool | None = None
    observed_ip: str | None = None
    likely_ip: str | None = None  # as above or, where nothing is agreed on, what most say
    keeps_ports: bool | None = None
    proven: tuple[tuple[str, int], ...] = ()  # IP addresses and ports that lead to us
    has_led_here: bool = False  # one peer at least says that it could dial us
    needs_relay: bool = False


def _distance(ip: str) -> int:
    return GLOBAL if is_public(ip) else reach_of_ip(ip)


def _family(ip: str) -> int:
    address = plain_ip(ip)
    return 4 if address is None else address.version


class Observations:
    """The voices heard, and what follows from them; bounded."""

    def __init__(self) -> None:
        self._opinions: BoundedTable[Voice, Opinion] = BoundedTable(VOICES_MAX)
        self._distance = 0
        self._agreed: dict[int, str] = {}  # by family; of the furthest distance alone
        self._proven: tuple[tuple[str, int], ...] = ()
        self._came_in: set[int] = set()  # families; since what is proven last changed

    def __len__(self) -> int:
        return len(self._opinions)

    def forget(self) -> None:
        """Something about our place has changed: what was heard before is of no use."""
        self._opinions = BoundedTable(VOICES_MAX)
        self._agreed.clear()
        self._came_in.clear()
        self._proven = ()

    # --- whom to ask -----------------------------------------------------------------------

    def whom(
        self, able: Iterable[tuple[PeerId, str]], now_s: float, rng: Random
    ) -> tuple[PeerId, str] | None:
        """Which of some peers, given with their IP addresses, to ask next; None: enough is known.

        Of the voices furthest away any, so that nobody comes first by its id or by its number.
        """
        new = [(peer, ip) for peer, ip in able if not self._is_fresh(voice_of(peer, ip), now_s)]
        if not new:
            return None
        furthest = max(_distance(ip) for _, ip in new)
        fresh = [
            opinion
            for voice, opinion in self._opinions.items()
            if self._is_fresh(voice, now_s) and _distance(opinion.witness_ip) >= furthest
        ]
        enough = VOICES_WANTED if self._is_of_one_mind() else VOICES_MAX
        if len(fresh) >= enough:
            return None
        by_voice: dict[Voice, list[tuple[PeerId, str]]] = {}
        for peer, ip in new:
            if _distance(ip) == furthest:
                by_voice.setdefault(voice_of(peer, ip), []).append((peer, ip))
        return rng.choice(rng.choice(list(by_voice.values())))

    def _is_fresh(self, voice: Voice, now_s: float) -> bool:
        opinion = self._opinions.get(voice)
        return opinion is not None and now_s - opinion.at_s < ASK_AGAIN_S

    def _is_of_one_mind(self) -> bool:
        said = {(opinion.observed_ip, bool(opinion.ports)) for opinion in self._counting()}
        return len({_family(ip) for ip, _ in said}) == len(said)  # of each family one thing

    # --- what they say -----------------------------------------------------------------------

    def hear(self, peer: PeerId, opinion: Opinion) -> None:
        """Take note of what a peer says; the newest opinion of each voice counts."""
        if is_public(opinion.witness_ip) != is_public(opinion.observed_ip):
            return
        families = {_family(opinion.witness_ip), _family(opinion.observed_ip)}
        if is_public(opinion.witness_ip) and len(families) > 1:
            return  # else who has an address of each family would be two voices
        voice = voice_of(peer, opinion.witness_ip)
        self._opinions.put(voice, opinion)

    def came_in(self, peer: PeerId, ip: str) -> None:
        """Note a new connection that a peer has made to us. One of those who say that it can be
        made proves nothing: it may have come another way."""
        voice = voice_of(peer, ip)
        opinion = self._opinions.get(voice)
        if is_public(ip) and (opinion is None or not opinion.ports):
            self._came_in.add(_family(ip))

    def _counting(self) -> list[Opinion]:
        """The opinions of the peers furthest away."""
        if not self._opinions:
            return []
        furthest = max(_distance(o.witness_ip) for o in self._opinions.values())
        return [o for o in self._opinions.values() if _distance(o.witness_ip) == furthest]

    # --- what is believed --------------------------------------------------------------------

    def decide(self, now_s: float) -> ReachVerdict:
        """What is believed now."""
        for voice, opinion in list(self._opinions.items()):
            if now_s - opinion.at_s > FORGET_S:
                self._opinions.pop(voice)
        counting = self._counting()
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
            needs_relay=self._needs_relay(reachable),
        )

    def _agree(self, family: int, opinions: list[Opinion]) -> None:
        """Settle on an address of one family, if enough voices do and more than for the last."""
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
        """Where enough voices got through to us, at the address that is agreed on."""
        led = [
            (opinion.observed_ip, port)
            for opinion in counting
            if opinion.observed_ip in self._agreed.values()
            for port in sorted(opinion.ports)
        ]
        enough = self._enough(len(counting))
        return tuple(sorted(each for each, count in Counter(led).items() if count >= enough))

    def _needs_relay(self, reachable: bool | None) -> bool:
        if self._distance < GLOBAL:
            return reachable is False
        return not any(_family(ip) in self._came_in for ip, _ in self._proven)
