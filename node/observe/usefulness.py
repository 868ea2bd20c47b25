"""The gain of a node from sharing, measured from its rounds. Pure.

A group teaches if its rewards differ. Sharing brings more such groups per token that the node
generates. The gain per second is smaller, because training on foreign groups takes time too. A
foreign group counts as much as an own one, which is too much if the own policy would not sample it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean
from typing import Final

from node.observe.records import RoundDone
from node.observe.text_format import amount, duration

ROUNDS_MIN: Final = 10  # before anything is said
ROUNDS_MAX: Final = 200  # the newest, which count
WORTH_MIN: Final = 1.1  # times as many groups as alone; below, sharing made no difference
TIMES_MAX: Final = 20  # above it own groups taught too little to say how many times
Z_95: Final = 1.96  # of the normal distribution
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
    foreign = fmean(map(_foreign, rounds))
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


@dataclass(frozen=True, slots=True)
class Saved:
    """The generating that foreign groups took the place of, with its interval of 95 %: own tokens
    and seconds until as many more own groups had taught."""

    foreign: int  # groups that taught
    own: int
    tokens: tuple[float, float, float]  # the estimate, and its interval
    seconds: float


def saved(rounds: Sequence[RoundDone]) -> Saved | None:
    """Of these rounds; None: too few rounds, or no own group taught, so nothing can be said."""
    told = [each for each in rounds if each.own_informative is not None and each.generated_tokens]
    own = [each.own_taught - each.hinted_taught for each in told]
    if len(told) < ROUNDS_MIN or not sum(own):
        return None
    foreign = [_foreign(each) for each in told]
    ratio = sum(foreign) / sum(own)
    # a ratio of sums over rounds, by the delta method
    off = [f - ratio * o for f, o in zip(foreign, own, strict=True)]
    half = Z_95 * sqrt(sum(each * each for each in off)) / sum(own)
    tokens = sum(each.generated_tokens for each in told)
    low, high = max(0.0, ratio - half), ratio + half
    return Saved(
        sum(foreign),
        sum(own),
        (ratio * tokens, low * tokens, high * tokens),
        ratio * sum(each.generate_s + each.score_s for each in told),
    )


def saved_text(rounds: Sequence[RoundDone]) -> str:
    """The gain of a session in tokens and time; empty: none, or too early to say."""
    found = saved(rounds)
    if found is None or not found.foreign:
        return ""
    tokens, low, high = (amount(each) for each in found.tokens)
    return (
        f"sharing, {len(rounds)} rounds: {found.foreign} groups of others taught beside "
        f"{found.own} of your own; alone, as many would have taken about {tokens} more tokens "
        f"({low} to {high}), "
        f"{duration(found.seconds)} of generating"
    )


def _foreign(each: RoundDone) -> int:
    """Foreign groups that taught, and own ones that taught by a foreign completion or hint."""
    more = max(0, each.informative_groups - each.own_taught)
    return more + each.rescued_groups + each.hinted_taught


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
