"""Generate: completions that are looked at on their way, and go on from a beginning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log
from typing import Any, Final

from node.interfaces.engine import Outcome, Recorded
from node.methods.generation import (
    ROLLOUTS_MAX,
    Branching,
    Pruning,
    branching,
    is_cut,
    pruning,
    survivors,
    tree_share,
)
from node.methods.quality_head import QualityHead
from node.stages.stage import RoundOutcome, Sample, Stage, View, Wanted
from swarm.rollouts import Completion, FinishReason

WAVES_MAX: Final = 6  # of branches in a round, each of two calls of the engine; ours


def _asked(wanted: Wanted, **changes: Any) -> Wanted:
    return replace(wanted, request=replace(wanted.request, **changes))


def _going_on(wanted: Wanted, begun: Completion) -> Wanted:
    """One completion that continues another one's tokens, with their log-probs."""
    told = {"beginning": begun.token_ids, "beginning_logprobs": begun.logprobs}
    return _asked(wanted, n=1, seed=None, **told)


def _limit(wanted: Wanted, at: View) -> int:
    return wanted.request.settings(at.sampling).max_new_tokens


def _is_open(completion: Completion, looked_at: int) -> bool:
    """True if it was interrupted at this many tokens."""
    ended = completion.finish_reason is not FinishReason.LENGTH
    return not ended and len(completion.token_ids) == looked_at


class PruneRollouts(Stage[Pruning]):
    """ARRoL: rollouts are judged by their hidden states after a share of their limit, and some of
    them end there. Those that go on count by 1 / the probability that they did."""

    def __init__(self, set_to: Pruning) -> None:
        super().__init__(set_to)
        self._head = QualityHead()

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        looked_at = [ceil(self.set_to.look_at * _limit(each, at)) for each in wanted]
        begun = await sample(
            [
                _asked(each, limit=tokens, record=each.request.record | {"hidden"})
                for each, tokens in zip(wanted, looked_at, strict=True)
            ]
        )
        judged = [
            (owner, place)
            for owner, outcome in enumerate(begun)
            for place, each in enumerate(outcome.completions)
            if _is_open(each, looked_at[owner]) and looked_at[owner] < _limit(wanted[owner], at)
        ]
        states = [begun[owner].recorded[place].hidden for owner, place in judged]
        chances = self._head.chances(states)
        found = [
            each
            for first in range(0, len(chances), ROLLOUTS_MAX)
            for each in pruning(chances[first : first + ROLLOUTS_MAX], at.step, self.set_to)
        ]
        left = [judged[number] for number in survivors(found, at.rng("pruning"))]
        self.acted += len(judged) - len(left)
        more = await sample(
            [_going_on(wanted[owner], begun[owner].completions[place]) for owner, place in left]
        )
        done, survival = dict(zip(left, more, strict=True)), dict(zip(judged, found, strict=True))
        return [_pruned(owner, outcome, survival, done) for owner, outcome in enumerate(begun)]

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        states, right, weights = [], [], []
        for each in outcome.own:
            if not each.scored.decided:
                continue
            columns = (each.column("recorded", Recorded()), each.scored.rewards)
            for told, reward, weight in zip(*columns, each.column("weights", 1.0), strict=True):
                if told.hidden:
                    states.append(told.hidden)
                    right.append(reward == 1.0)
                    weights.append(weight)
        self._head.learn(states, right, weights)

    def to_record(self) -> Any:
        return self._head.to_record()

    def restore(self, record: Any) -> None:
        self._head.restore(record)


_Place = tuple[int, int]  # of a completion: number of its request, and its own


def _pruned(
    owner: int, begun: Outcome, survival: Mapping[_Place, float], done: Mapping[_Place, Outcome]
) -> Outcome:
    """The completions that came to an end, each with the state that it was judged by."""
    completions, recorded, weights = [], [], []
    for place, (made, told) in enumerate(zip(begun.completions, begun.recorded, strict=True)):
        name = owner, place
        if name in survival and name not in done:
            continue
        if name in done:
            # no splice: all of it was sampled in this round
            made = replace(done[name].completions[0], splices=())
            told = replace((*done[name].recorded, Recorded())[0], hidden=told.hidden)
        completions.append(made)
        recorded.append(told)
        weights.append(1.0 / survival.get(name, 1.0))
    is_chosen = any(each < 1.0 for (its, _), each in survival.items() if its == owner)
    return Outcome(tuple(completions), tuple(recorded), tuple(weights), is_chosen)


@dataclass(slots=True)
class _Leaf:
    """A completion of a tree. All but the first part from a parent by a second likeliest token."""

    request: Wanted
    begun: int = 0  # tokens up to that one, included: it branches nowhere before
    parent: tuple[int, ...] = ()  # its tokens
    outcome: Outcome = field(default_factory=lambda: Outcome(()))

    @property
    def made(self) -> Completion:
        return self.outcome.completions[0]

    def points(self, set_to: Branching) -> list[int]:
        """The tokens at which another one was almost as likely, and was not taken."""
        columns = zip(self.made.token_ids, self.outcome.recorded[0].runners_up, strict=True)
        return [
            place
            for place, (token, (second, *chances)) in enumerate(columns)
            if place >= self.begun and token != second
            if branching(chances[0], chances[1], place, 0, set_to)
        ]

    def branch(self, place: int) -> "_Leaf":
        made, (second, _, chance) = self.made, self.outcome.recorded[0].runners_up[place]
        request = _asked(
            self.request,
            beginning=(*made.token_ids[:place], second),
            beginning_logprobs=(*made.logprobs[:place], log(chance)),
        )
        return _Leaf(request, place + 1, made.token_ids)

    def is_cut(self, set_to: Branching) -> bool:
        """True if it says what its parent says: after so many tokens, or at its own end."""
        parted = self.begun - 1
        said = self.made.token_ids[parted:]
        lengths = tuple({min(each, len(said)) for each in set_to.look_ahead})
        fit = replace(set_to, look_ahead=lengths)
        return any(is_cut(self.parent[parted:], said[:length], fit) for length in lengths)


@dataclass(slots=True)
class _Tree:
    """Completions of one request that begin as one."""

    leaves_max: int
    leaves: list[_Leaf]
    points: list[tuple[int, _Leaf]] = field(default_factory=list)  # the next ones to branch at

    def add(self, leaf: _Leaf, set_to: Branching) -> None:
        self.points += [(place, leaf) for place in leaf.points(set_to)]
        self.points.sort(key=lambda point: point[0])

    def branches(self) -> list[_Leaf]:
        """The next branches to try, as many as there is room for."""
        room = self.leaves_max - len(self.leaves)
        taken, self.points = self.points[:room], self.points[room:]
        return [leaf.branch(place) for place, leaf in taken]


class GrowTrees(Stage[Branching]):
    """LATR: some rollouts of a task are a tree, and the others plain. A tree grows in waves, each
    of whole completions, and not token by token. All log-probs are the policy's own, those of the
    second likeliest tokens too."""

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        share = tree_share(at.step, self.set_to)
        forest = [self._planted(each, round(share * each.request.n)) for each in wanted]
        trees = [tree for its in forest for tree in its]
        limits = [_limit(tree.leaves[0].request, at) for tree in trees]
        await _grow([tree.leaves[0] for tree in trees], limits, sample)
        for tree in trees:
            tree.add(tree.leaves[0], self.set_to)
        for _ in range(WAVES_MAX):
            tried = [(tree, leaf) for tree in trees for leaf in tree.branches()]
            if not tried:
                break
            await self._try([leaf for _, leaf in tried], at, sample)
            for tree, leaf in tried:
                if not leaf.is_cut(self.set_to):
                    tree.leaves.append(leaf)
                    tree.add(leaf, self.set_to)
                    self.acted += 1
        leaves = [[leaf for tree in its for leaf in tree.leaves] for its in forest]
        missing = [each.request.n - len(its) for each, its in zip(wanted, leaves, strict=True)]
        asked = zip(wanted, missing, strict=True)
        plain = iter(await sample([_asked(each, n=count) for each, count in asked if count]))
        return [
            _joined(its, next(plain) if count else Outcome(()))
            for its, count in zip(leaves, missing, strict=True)
        ]

    def _planted(self, wanted: Wanted, leaves: int) -> list[_Tree]:
        """The trees for so many rollouts; one alone is no tree."""
        most = self.set_to.leaves_max
        sizes = [min(most, leaves - begun) for begun in range(0, leaves, most)]
        record = wanted.request.record | {"runners_up"}
        trunk = _asked(wanted, n=1, seed=None, record=record)
        return [_Tree(size, [_Leaf(trunk)]) for size in sizes if size > 1]

    async def _try(self, branches: Sequence[_Leaf], at: View, sample: Sample) -> None:
        """Sample branches up to the longest look ahead, and those that are not cut to their end."""
        ahead, limits = max(self.set_to.look_ahead), [_limit(each.request, at) for each in branches]
        looked_at = [
            min(limit, each.begun - 1 + ahead) for each, limit in zip(branches, limits, strict=True)
        ]
        await _grow(branches, looked_at, sample)
        left = [
            (each, limit)
            for each, limit, tokens in zip(branches, limits, looked_at, strict=True)
            if tokens < limit and _is_open(each.made, tokens) and not each.is_cut(self.set_to)
        ]
        for each, _ in left:
            each.request = _going_on(each.request, each.made)
        await _grow([each for each, _ in left], [limit for _, limit in left], sample)


async def _grow(leaves: Sequence[_Leaf], limits: Sequence[int], sample: Sample) -> None:
    """Sample leaves up to so many tokens."""
    asked = zip(leaves, limits, strict=True)
    made = await sample([_asked(leaf.request, limit=limit) for leaf, limit in asked])
    for leaf, outcome in zip(leaves, made, strict=True):
        leaf.outcome = outcome


def _joined(leaves: Sequence[_Leaf], plain: Outcome) -> Outcome:
    """The completions of trees, and plain ones. Branches make them private."""
    grown = [replace(each.made, splices=(each.begun,) if each.begun else ()) for each in leaves]
    told = [each.outcome.recorded[0] for each in leaves]
    nothing = (Recorded(),) * len(plain.completions)
    is_private = any(each.begun for each in leaves)
    completions, recorded = (*grown, *plain.completions), (*told, *(plain.recorded or nothing))
    return Outcome(completions, recorded, private=is_private)
