"""The gain of a node from sharing: measured from its rounds, and expected from pass rates. Pure.

A group teaches if its rewards differ. Sharing brings more such groups per token that the node
generates. Per second the gain is smaller the more of a second training takes, because foreign
groups are trained on too; it is never a loss. A foreign group counts as much as an own one. That
holds if it is likely enough under the own policy; otherwise the figure is too high.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Final

from node.methods.checked import probability
from node.methods.filters import informative_probability
from node.observe.records import RoundDone

ROUNDS_MIN: Final = 10  # before anything is said
ROUNDS_MAX: Final = 200  # the newest, of which it is said
WORTH_MIN: Final = 1.1  # times as many as alone: below, it is a draw
TIMES_MAX: Final = 20  # above that, own groups taught too little to say how many times
ONE_SIDED_MAX: Final = 0.5  # of rounds: above, it is one node's bound that keeps groups out
WANTED_SHARE: Final = 0.9  # of the groups of others that a node wants, which it finds nearly always


@dataclass(frozen=True, slots=True)
class GroupCost:
    """The cost of a group to a node."""

    generate_tokens: float  # of its completions
    generate_s: float  # with scoring
    train_s: float  # if it teaches; what does not is left out of the update


@dataclass(frozen=True, slots=True)
class Yield:
    """Groups that teach in a round, and the tokens and seconds spent on them."""

    own: float  # own groups that teach
    foreign: float  # others' groups that teach
    tokens: float  # generated
    generate_s: float
    train_s: float

    @property
    def per_token(self) -> float:
        """Groups that teach, for a token that the node generated itself."""
        return (self.own + self.foreign) / self.tokens if self.tokens else 0.0

    @property
    def per_second(self) -> float:
        """Groups that teach, for a second of generating and training."""
        seconds = self.generate_s + self.train_s
        return (self.own + self.foreign) / seconds if seconds else 0.0


def expected_alone(share: float, groups: int, cost: GroupCost) -> Yield:
    """Of a node that trains on its own groups alone.

    Args:
        share: of its groups those that teach, in [0, 1]; see `informative_share`.
        groups: I, own ones in a round.

    Raises:
        ValueError: the share is none.
    """
    own = groups * probability(share, "share of groups that teach")
    return Yield(
        own, 0.0, groups * cost.generate_tokens, groups * cost.generate_s, own * cost.train_s
    )


def expected_together(
    share: float,
    others: Sequence[float],
    groups: int,
    foreign: int,
    cost: GroupCost,
    *,
    each_max: float = inf,
) -> Yield:
    """Of a node that also takes up to `foreign` (J) groups of other nodes that make as many, of
    those that teach, each once. `others`: the share of each of them that teach; `each_max`: how
    many of one producer a round takes.

    Raises:
        ValueError: a share is none.
    """
    alone = expected_alone(share, groups, cost)
    offered = sum(min(each_max, expected_alone(each, groups, cost).own) for each in others)
    taken = min(float(foreign), offered)
    train_s = (alone.own + taken) * cost.train_s
    return Yield(alone.own, taken, alone.tokens, alone.generate_s, train_s)


def informative_share(passes: Sequence[float], group_size: int) -> float:
    """Of groups of G completions, one for each task, how many have rewards that differ, by the
    pass rate of each task, in [0, 1]. Where pass rates were found with few samples this is too low,
    as one that is found to be 0 is none: groups of G samples themselves tell more.

    Raises:
        ValueError: there is no task, a pass rate is no probability, or G is below 1.
    """
    if not passes:
        raise ValueError("no task")
    return fmean(informative_probability(each, group_size) for each in passes)


@dataclass(frozen=True, slots=True)
class Usefulness:
    """The measured gain from sharing: means of rounds, and ratios to a node without sharing."""

    rounds: int
    found: Yield
    taken: float  # groups of others trained on in a round, whether they teach or not
    wanted: float  # J
    per_token: float  # times as many groups that teach for each token as alone; inf: alone none
    per_second: float  # the same for each second
    one_sided: float  # of rounds with groups of several others those with most from one of them


def usefulness(rounds: Sequence[RoundDone], wanted: int) -> Usefulness | None:
    """Of a node's newest rounds, but those of older logs that do not say which own groups taught;
    None: too few to say anything. Alone the node is taken to train as long as its share of the
    groups that taught. An own group that is all wrong and took others' right completions is
    theirs, and so is one that taught by a hint of what they made. `wanted`: J of rounds whose
    records do not say it."""
    rounds = [each for each in rounds if each.own_informative is not None][-ROUNDS_MAX:]
    if len(rounds) < ROUNDS_MIN:
        return None
    found = Yield(
        own=fmean(each.own_taught - each.hinted_taught for each in rounds),
        foreign=fmean(
            max(0, each.informative_groups - each.own_taught)
            + each.rescued_groups
            + each.hinted_taught
            for each in rounds
        ),
        tokens=fmean(each.generated_tokens for each in rounds),
        generate_s=fmean(each.generate_s + each.score_s for each in rounds),
        train_s=fmean(each.train_s for each in rounds),
    )
    taught = found.own + found.foreign
    share = found.own / taught if taught else 1.0
    alone = Yield(found.own, 0.0, found.tokens, found.generate_s, share * found.train_s)
    return Usefulness(
        len(rounds),
        found,
        fmean(each.external_groups for each in rounds),
        fmean(wanted if e.external_wanted is None else e.external_wanted for e in rounds),
        _ratio(found.per_token, alone.per_token),
        _ratio(found.per_second, alone.per_second),
        _one_sided([each.foreign_by_producer for each in rounds]),
    )


def advice(useful: Usefulness) -> str:
    """One sentence for the node's owner."""
    if not useful.wanted:
        return "This node takes no groups of others; --external 4 would take up to four a round."
    if not useful.found.own + useful.found.foreign:
        return (
            "No group taught anything, own or foreign: tasks of another difficulty would, or "
            "another model."
        )
    if not useful.found.own:
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
    """A ratio as text, for people."""
    return f"{ratio:.1f}" if ratio < TIMES_MAX else f"more than {TIMES_MAX}"


def _one_sided(each: Sequence[Mapping[str, int]]) -> float:
    several = [counts for counts in each if len(counts) > 1]
    most = [2 * max(counts.values()) >= sum(counts.values()) for counts in several]
    return sum(most) / len(most) if most else 0.0


def _ratio(one: float, other: float) -> float:
    if other:
        return one / other
    return inf if one else 1.0
