"""The gain of a node from sharing, measured from its rounds. Pure.

A group teaches if its rewards differ. Sharing brings more such groups per token that the node
generates. The gain per second is smaller, because training on foreign groups takes time too. A
foreign group counts as much as an own one, which is too much if the own policy would not sample it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Final

from node.observe.records import RoundDone

ROUNDS_MIN: Final = 10  # before anything is said
ROUNDS_MAX: Final = 200  # the newest, which count
WORTH_MIN: Final = 1.1  # times as many groups as alone; below, sharing made no difference
TIMES_MAX: Final = 20  # above it own groups taught too little to say how many times
ONE_SIDED_MAX: Final = 0.5  # of rounds; above it the bound on one producer keeps groups out
WANTED_SHARE: Final = 0.9  # of J; above it the node finds nearly all groups that it wants


@dataclass(frozen=True, slots=True)
class Usefulness:
    """The measured gain from sharing: means over rounds, and ratios to a node without sharing."""

    own: float  # own groups that teach, a round
    foreign: float  # foreign groups that teach, a round
    taken: float  # foreign groups trained on in a round, whether they teach or not
    wanted: float  # J
    per_token: float  # groups that teach for each generated token, over those alone; inf: none
    per_second: float  # the same for each second
    one_sided: float  # share of rounds with several producers in which one made half or more


def usefulness(rounds: Sequence[RoundDone], wanted: int) -> Usefulness | None:
    """The gain in a node's newest rounds; None: too few rounds. `wanted`: J of rounds whose records
    do not say it.

    Alone, the node is taken to train for its own groups' share of the time. A group that teaches by
    a foreign completion or hint counts as foreign.
    """
    rounds = [each for each in rounds if each.own_informative is not None][-ROUNDS_MAX:]
    if len(rounds) < ROUNDS_MIN:
        return None
    own = fmean(each.own_taught - each.hinted_taught for each in rounds)
    foreign = fmean(
        max(0, each.informative_groups - each.own_taught) + each.rescued_groups + each.hinted_taught
        for each in rounds
    )
    generate_s = fmean(each.generate_s + each.score_s for each in rounds)
    train_s = fmean(each.train_s for each in rounds)
    taught = own + foreign
    alone_s = generate_s + (own / taught if taught else 1.0) * train_s
    generates = any(each.generated_tokens for each in rounds)
    return Usefulness(
        own,
        foreign,
        fmean(each.external_groups for each in rounds),
        fmean(wanted if e.external_wanted is None else e.external_wanted for e in rounds),
        _ratio(taught, own) if generates else 1.0,
        _ratio(taught * alone_s, own * (generate_s + train_s)),
        _one_sided([each.foreign_by_producer for each in rounds]),
    )


def advice(useful: Usefulness) -> str:
    if not useful.wanted:
        return "This node takes no groups of others; --external 4 would take up to four a round."
    if not useful.own + useful.foreign:
        return (
            "No group taught anything, own or foreign: tasks of another difficulty would, or "
            "another model."
        )
    if not useful.own:
        return "All that this node learned from came of others; its own groups taught nothing."
    brought = (
        f"Sharing brought {times_text(useful.per_token)} times the groups that teach for each "
        f"token generated, and {times_text(useful.per_second)} times for each second"
    )
    if useful.per_token < WORTH_MIN:
        return f"{brought}: alone, this node would have found as many."
    if useful.taken < WANTED_SHARE * useful.wanted:
        found = f"it found {useful.taken:.1f} of {useful.wanted:.1f} that it wanted a round"
        if useful.one_sided > ONE_SIDED_MAX:
            return (
                f"{brought}; {found}, most of them from one node, of which it takes no more than "
                "a part (foreign_share_max): more nodes would bring more."
            )
        return f"{brought}; {found}, so a higher --external would bring nothing."
    return f"{brought}: a higher --external may bring more."


def times_text(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < TIMES_MAX else f"more than {TIMES_MAX}"


def _one_sided(each: Sequence[Mapping[str, int]]) -> float:
    several = [counts for counts in each if len(counts) > 1]
    most = [2 * max(counts.values()) >= sum(counts.values()) for counts in several]
    return sum(most) / len(most) if most else 0.0


def _ratio(one: float, other: float) -> float:
    if other:
        return one / other
    return inf if one else 1.0
