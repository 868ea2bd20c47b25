"""Selection of the groups of a batch. Foreign ones by SAPO's rule (arXiv 2509.08721, §5), with a
bound on each producer's share and on the share without behaviour log-probs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

from node.methods.filters import ByNeed, by_need
from swarm.exchange.pool import Candidate
from swarm.identity import PeerId
from swarm.rollouts import GroupId, ScoredGroup, informative


def draw_foreign(
    candidates: Sequence[Candidate],
    count: int,
    rng: Random,
    per_producer_max: int | None = None,
) -> list[GroupId]:
    """A uniform draw without replacement of groups that have an advantage.

    No producer gets more than `per_producer_max` places (None: any number); else whoever offers
    most would have them all. A single producer has no bound. Fewer than `count` survivors are all
    drawn."""
    survivors = sorted(
        (c for c in candidates if informative(c.rewards)), key=lambda each: each.group_id
    )
    if per_producer_max is None or len({c.producer for c in survivors}) < 2:
        return [c.group_id for c in rng.sample(survivors, min(count, len(survivors)))]
    return _bounded(rng.sample(survivors, len(survivors)), count, per_producer_max)


def draw_needed(
    candidates: Sequence[Candidate],
    passes: Sequence[float],
    count: int,
    rng: Random,
    set_to: ByNeed,
    per_producer_max: int,
) -> list[GroupId]:
    """Draw by `by_need` among groups that have an advantage, with the bound of `draw_foreign`."""
    if len(passes) != len(candidates):
        raise ValueError(f"{len(passes)} pass rates of {len(candidates)} groups")
    order = by_need(passes, rng, set_to)
    if len({c.producer for c in candidates}) < 2:
        per_producer_max = count
    return _bounded([candidates[at] for at in order], count, per_producer_max)


def _bounded(order: Iterable[Candidate], count: int, per_producer_max: int) -> list[GroupId]:
    """The first `count` of these, at most `per_producer_max` of each producer."""
    places: Counter[PeerId] = Counter()
    drawn: list[GroupId] = []
    for candidate in order:
        if len(drawn) < count and places[candidate.producer] < per_producer_max:
            places[candidate.producer] += 1
            drawn.append(candidate.group_id)
    return drawn


def distinct(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Groups that are new, in order: of one task the first of each producer, and the first with the
    same texts. So copies and repetitions gain no second place."""
    found: list[ScoredGroup] = []
    known: set[object] = set()
    for each in groups:
        task, texts = each.group.task, tuple(sorted(c.text for c in each.group.completions))
        says = {(task, each.group.producer), (task, texts)}
        if not says & known:
            found.append(each)
        known |= says
    return found


def kept_completions(completions: int, kept_max: int, rng: Random) -> list[int]:
    """Places of the completions of a foreign group that go into the batch: all, or a uniform sample
    of `kept_max`, with the advantages that they have in the whole group."""
    if completions <= kept_max:
        return list(range(completions))
    return sorted(rng.sample(range(completions), kept_max))


def within_unknown_share(
    groups: Sequence[tuple[int, int]], share_max: float, others: int = 0
) -> list[int]:
    """Places of the groups, each (completions, those without behaviour log-probs), to use: all that
    lack none, and others in order, whole or not at all, while at most `share_max` of the used
    completions lack log-probs. `others`: completions outside these groups that lack nothing."""
    used = [place for place, (_, lacking) in enumerate(groups) if lacking == 0]
    total = others + sum(groups[place][0] for place in used)
    lacking_total = 0
    for place, (completions, lacking) in enumerate(groups):
        if lacking and lacking_total + lacking <= share_max * (total + completions):
            used.append(place)
            total, lacking_total = total + completions, lacking_total + lacking
    return sorted(used)
