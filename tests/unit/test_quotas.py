"""The token buckets, on a clock of their own."""

from swarm.identity import PeerId
from swarm.limits.address_blocks import Block
from swarm.limits.quotas import BLOCK_SHARE, BUCKETS_MAX, RELAYED, Kind, Quotas, Rate, Verdict
from swarm.peers.connection_gater import CONNECTION_LIMITS

RATES = {kind: Rate(per_s=1.0, burst=10.0) for kind in Kind}
ONE, OTHER = PeerId("one"), PeerId("other")
BLOCK = Block("192.0.2.0/24")


def granted(quotas: Quotas, peer: PeerId, block: Block | None, times: int, now: float) -> int:
    verdicts = [quotas.spend(Kind.WANT, peer, block, now) for _ in range(times)]
    return verdicts.count(Verdict.GRANTED)


def test_a_burst_is_granted_and_then_the_rate() -> None:
    quotas = Quotas(RATES)
    assert granted(quotas, ONE, None, 15, 0.0) == 10
    assert granted(quotas, OTHER, None, 15, 0.0) == 10
    assert quotas.refused[Kind.WANT] == 10
    assert [granted(quotas, ONE, None, 1, 6.0 + now) for now in range(5)] == [1] * 5
    assert quotas.spend(Kind.HELLO, ONE, None, 0.0) is Verdict.GRANTED


def test_asking_on_and_on_is_a_flood_and_waiting_is_not() -> None:
    quotas = Quotas(RATES)
    verdicts = [quotas.spend(Kind.WANT, ONE, None, 0.0) for _ in range(40)]
    assert verdicts.count(Verdict.FLOOD) == 3
    assert verdicts.index(Verdict.FLOOD) == 19
    patient = [quotas.spend(Kind.WANT, OTHER, None, 2.0 * now) for now in range(100)]
    assert set(patient) == {Verdict.GRANTED}


def test_a_thousand_identities_of_one_block_get_a_few_shares() -> None:
    quotas = Quotas(RATES)
    identities = [PeerId(f"sybil{number}") for number in range(1000)]
    sum_granted = sum(granted(quotas, each, BLOCK, 2, 0.0) for each in identities)
    assert sum_granted == BLOCK_SHARE * 10
    alone = Quotas(RATES)
    assert sum(granted(alone, each, None, 2, 0.0) for each in identities) == 2000  # the control


def test_neighbours_of_a_flood_are_refused_and_not_blamed() -> None:
    quotas = Quotas(RATES)
    for number in range(100):
        granted(quotas, PeerId(f"sybil{number}"), BLOCK, 2, 0.0)
    assert quotas.spend(Kind.WANT, ONE, BLOCK, 0.0) is Verdict.REFUSED


def test_the_number_of_buckets_is_bounded() -> None:
    quotas = Quotas(RATES)
    for number in range(2 * BUCKETS_MAX):
        quotas.spend(Kind.WANT, PeerId(f"peer{number}"), BLOCK, 0.0)
    assert len(quotas._buckets) == BUCKETS_MAX


def test_as_many_relayed_peers_as_may_connect_can_ask_at_an_honest_pace() -> None:
    peers = [PeerId(f"relayed{number}") for number in range(CONNECTION_LIMITS.relayed or 0)]
    every_s = {Kind.CONNECT: 60, Kind.HELLO: 5, Kind.CATCH_UP: 15, Kind.WANT: 1, Kind.HAVE: 1}

    def refused(block: Block) -> int:
        quotas = Quotas()  # with the rates of a node; everybody comes at once
        for now in range(600):
            for kind, pause in every_s.items():
                if now % pause == 0:
                    for peer in peers:
                        quotas.spend(kind, peer, block, float(now))
        return quotas.refused.total()

    assert refused(RELAYED) == 0
    assert refused(BLOCK) > 0  # the control: a block's share would be too small
