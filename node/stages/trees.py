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


def _going_on(wanted: Wanted, begun: Completion, **changes: Any) -> Wanted:
    """One completion that continues another one's tokens, with their log-probs."""
    told = {"beginning": begun.token_ids, "beginning_logprobs": begun.logprobs}
    return _asked(wanted, n=1, seed=None, **{**told, **changes})


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
    """A completion of a tree."""

    made: Completion
    recorded: Recorded
    begun: int = 0  # tokens up to its own first one: it branches nowhere before

    def points(self, set_to: Branching) -> list[int]:
        """The tokens at which another one was almost as likely, and was not taken."""
        return [
            place
            for place in range(self.begun, len(self.made.token_ids))
            if self.recorded.runners_up[place][0] != self.made.token_ids[place]
            and branching(*self.recorded.runners_up[place][1:], place, 0, set_to)
        ]


@dataclass(slots=True)
class _Branch:
    """A completion that parts from another one by the second likeliest token."""

    tree: "_Tree"
    parent: Completion
    begun: int  # tokens, the second likeliest included
    request: Wanted
    leaf: _Leaf | None = None

    @classmethod
    def of(cls, tree: "_Tree", place: int, leaf: _Leaf) -> "_Branch":
        second, _, chance = leaf.recorded.runners_up[place]
        made = leaf.made
        request = _going_on(
            tree.wanted,
            made,
            beginning=(*made.token_ids[:place], second),
            beginning_logprobs=(*made.logprobs[:place], log(chance)),
        )
        return cls(tree, made, place + 1, request)

    def take(self, outcome: Outcome) -> None:
        made = replace(outcome.completions[0], splices=(self.begun,))
        self.leaf = _Leaf(made, outcome.recorded[0], self.begun)

    def is_cut(self, set_to: Branching) -> bool:
        """True if it says what its parent says: after so many tokens, or at its own end."""
        assert self.leaf is not None
        said, parted = self.leaf.made.token_ids, self.begun - 1
        lengths = tuple({min(each, len(said) - parted) for each in set_to.look_ahead})
        fit = replace(set_to, look_ahead=lengths)
        parent = self.parent.token_ids[parted:]
        return any(is_cut(parent, said[parted:][:length], fit) for length in lengths)


@dataclass(slots=True)
class _Tree:
    """The completions of one request that began as one."""

    wanted: Wanted
    leaves_max: int
    leaves: list[_Leaf] = field(default_factory=list)
    points: list[tuple[int, int]] = field(default_factory=list)  # (token, leaf), ascending

    def add(self, leaf: _Leaf, set_to: Branching) -> None:
        self.points += [(place, len(self.leaves)) for place in leaf.points(set_to)]
        self.points.sort()
        self.leaves.append(leaf)

    def branches(self) -> list[_Branch]:
        """The next branches to try, as many as there is room for."""
        room = max(0, self.leaves_max - len(self.leaves))
        taken, self.points = self.points[:room], self.points[room:]
        return [_Branch.of(self, place, self.leaves[leaf]) for place, leaf in taken]


class GrowTrees(Stage[Branching]):
    """LATR: some rollouts of a task are a tree, and the others plain. A tree grows in waves, each
    of whole completions, and not token by token. All log-probs are the policy's own, those of the
    second likeliest tokens too."""

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        share = tree_share(at.step, self.set_to)
        forest = [self._planted(each, round(share * each.request.n)) for each in wanted]
        trees = [tree for its in forest for tree in its]
        trunks = await sample([_asked(tree.wanted, n=1) for tree in trees])
        for tree, trunk in zip(trees, trunks, strict=True):
            tree.add(_Leaf(trunk.completions[0], trunk.recorded[0]), self.set_to)
        for _ in range(WAVES_MAX):
            branches = [branch for tree in trees for branch in tree.branches()]
            if not branches:
                break
            for each in await self._grown(branches, at, sample):
                assert each.leaf is not None
                each.tree.add(each.leaf, self.set_to)
                self.acted += 1
        leaves = [[leaf for tree in its for leaf in tree.leaves] for its in forest]
        plain = await sample(
            [
                _asked(each, n=each.request.n - len(its))
                for each, its in zip(wanted, leaves, strict=True)
                if len(its) < each.request.n
            ]
        )
        rest = iter(plain)
        return [
            _joined(its, next(rest) if len(its) < each.request.n else Outcome(()), each)
            for each, its in zip(wanted, leaves, strict=True)
        ]

    def _planted(self, wanted: Wanted, leaves: int) -> list[_Tree]:
        """The trees for so many rollouts; one alone is no tree."""
        most = self.set_to.leaves_max
        sizes = [min(most, leaves - begun) for begun in range(0, leaves, most)]
        recording = _asked(wanted, seed=None, record=wanted.request.record | {"runners_up"})
        return [_Tree(recording, size) for size in sizes if size > 1]

    async def _grown(
        self, branches: Sequence[_Branch], at: View, sample: Sample
    ) -> Sequence[_Branch]:
        """The branches that differ from their parents, whole."""
        ahead = max(self.set_to.look_ahead)
        looked_at = [min(_limit(each.request, at), each.begun - 1 + ahead) for each in branches]
        tried = await sample(
            [
                _asked(each.request, limit=limit)
                for each, limit in zip(branches, looked_at, strict=True)
            ]
        )
        going_on = []
        for each, outcome, limit in zip(branches, tried, looked_at, strict=True):
            each.take(outcome)
            made = outcome.completions[0]
            is_short = _is_open(made, limit) and limit < _limit(each.request, at)
            if is_short and not each.is_cut(self.set_to):
                going_on.append((each, _going_on(each.request, made)))
        kept = [each for each in branches if not each.is_cut(self.set_to)]
        more = await sample([request for _, request in going_on])
        for (each, _), outcome in zip(going_on, more, strict=True):
            each.take(outcome)
        return kept


def _joined(leaves: Sequence[_Leaf], plain: Outcome, wanted: Wanted) -> Outcome:
    """The completions of trees, and plain ones. Branches make them private."""
    completions = (*(leaf.made for leaf in leaves), *plain.completions)
    recorded = (*(leaf.recorded for leaf in leaves), *plain.recorded)
    is_tree = any(leaf.begun for leaf in leaves)
    return Outcome(completions, recorded if wanted.request.record else (), private=is_tree)
