"""The token buckets, on a clock of their own."""

from swarm.blocks import Block
from swarm.identity import PeerId
from swarm.quotas import BLOCK_SHARE, BUCKETS_MAX, Kind, Quotas, Rate, Verdict

RATES = {kind: Rate(per_s=1.0, burst=10.0) for kind in Kind}
ONE, OTHER = PeerId("one"), PeerId("other")
BLOCK = Block("192.0.2.0/24")


def granted(quotas: Quotas, peer: PeerId, block: Block | None, times: int, now: float) -> int:
    verdicts = [quotas.take(Kind.WANT, peer, block, now) for _ in range(times)]
    return verdicts.count(Verdict.GRANTED)


def test_a_burst_is_granted_and_then_the_rate() -> None:
    quotas = Quotas(RATES)
    assert granted(quotas, ONE, None, 15, 0.0) == 10
    assert granted(quotas, OTHER, None, 15, 0.0) == 10
    assert quotas.refused[Kind.WANT] == 10
    assert [granted(quotas, ONE, None, 1, 6.0 + now) for now in range(5)] == [1] * 5
    assert quotas.take(Kind.HELLO, ONE, None, 0.0) is Verdict.GRANTED


def test_asking_on_and_on_is_a_flood_and_waiting_is_not() -> None:
    quotas = Quotas(RATES)
    verdicts = [quotas.take(Kind.WANT, ONE, None, 0.0) for _ in range(40)]
    assert verdicts.count(Verdict.FLOOD) == 3
    assert verdicts.index(Verdict.FLOOD) == 19
    patient = [quotas.take(Kind.WANT, OTHER, None, 2.0 * now) for now in range(100)]
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
    assert quotas.take(Kind.WANT, ONE, BLOCK, 0.0) is Verdict.REFUSED


def test_the_number_of_buckets_is_bounded() -> None:
    quotas = Quotas(RATES)
    for number in range(2 * BUCKETS_MAX):
        quotas.take(Kind.WANT, PeerId(f"peer{number}"), BLOCK, 0.0)
    assert len(quotas._buckets) == BUCKETS_MAX
