"""Methods of rewards and advantages in a round: each acts, what is trained on is what its formula
says, and it goes on after a restart as if there had been none."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest
import trio

from node.config import load_config
from node.interfaces.engine import Recorded, Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup
from node.methods.advantages import Hacpo, grpo_advantages
from node.methods.groups import Advantages
from node.observe.records import RoundDone
from node.stages.advantage import MeasureByCapability
from node.stages.stage import BatchGroup, Stage, View
from node.stages.table import stages_of
from swarm.errors import ConfigError
from swarm.rollouts import Completion
from tests.pool_samples import PRODUCERS
from tests.unit.simulated_pair import rounds_beside
from tests.unit.stages_support import ONE_KIND, Played, Student, config_of, play
from tests.unit.test_learner_batch import of_size, view
from tests.unit.test_rescue import CONFIG, Kept

# --- HACPO ---------------------------------------------------------------------------------------


def right(group: TrainingGroup) -> list[float]:
    """Rewards of a group's sums, found from its texts alone."""
    wanted = sum(map(int, group.prompt.removesuffix("=").split("+")))
    return [float(each.text == str(wanted)) for each in group.completions]


def beside_another(**settings: Any) -> tuple[list[RoundDone], list[list[TrainingGroup]]]:
    """A node that solves a third, beside one that solves most."""
    config = CONFIG.model_copy(update={"external_groups": 4, **settings})
    policy = Kept(0.3)
    rounds = rounds_beside(config, policy, CONFIG, Kept(0.8))
    return rounds, policy.batches


def by_capability(batches: Sequence[Sequence[TrainingGroup]], kept: int = 5) -> list[bool]:
    """For each task that both tried: whether its advantages are HACPO's."""
    lately = defaultdict[str, list[float]](list)
    found = []
    for batch in batches:
        rewards = {id(each): right(each) for each in batch}
        told = defaultdict[str, list[float]](list)
        tasks = defaultdict[str, list[TrainingGroup]](list)
        for each in batch:
            told[each.source] += rewards[id(each)]
            tasks[each.prompt].append(each)
        for source, values in told.items():
            lately[source].append(fmean(values))
        able = {source: max(fmean(means[-kept:]), 1e-8) for source, means in lately.items()}
        for groups in tasks.values():
            every = [r for each in groups for r in rewards[id(each)]]
            if len({each.source for each in groups}) < 2 or len(set(every)) < 2:
                continue
            lead = {s: min(max(able[""] / able[s], 0.1), 10.0) for s in able}
            mu = fmean(lead[each.source] * r for each in groups for r in rewards[id(each)])
            if mu > 1:
                mu = fmean(r for each in groups if not each.source for r in rewards[id(each)])
            wanted = [
                (r - mu) / (stdev(every) + 1e-6) / lead[each.source]
                for each in groups
                for r in rewards[id(each)]
            ]
            told_to = [value for each in groups for value in each.advantages]
            found.append(told_to == pytest.approx(wanted))
    return found


HACPO: dict[str, Any] = {"advantage": Hacpo()}


def test_common_tasks_are_measured_by_how_able_who_tried_them_is() -> None:
    rounds, batches = beside_another(**HACPO)
    assert sum(each.acted.get("hacpo", 0) for each in rounds) > 0
    found = by_capability(batches)
    assert len(found) > 5
    assert all(found)


async def _grpo(_: object, batch: Sequence[BatchGroup], at: View) -> Advantages:
    return [grpo_advantages(each.scored.rewards) for each in batch]


@pytest.mark.parametrize(("hook", "planted"), [("reward", Stage.reward), ("advantage", _grpo)])
def test_without_what_hacpo_does_its_effect_is_absent(
    hook: str, planted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeasureByCapability, hook, planted)
    _, batches = beside_another(**HACPO)
    assert not all(by_capability(batches))


def test_what_is_known_of_peers_outlives_a_restart_and_has_a_bound() -> None:
    at = view("t")
    stage, again = MeasureByCapability(Hacpo(rounds=2)), MeasureByCapability(Hacpo(rounds=2))
    both = [BatchGroup(of_size(1, 5)), BatchGroup(of_size(1, 3), drawn=True)]
    for _ in range(3):
        stage.reward(both, at)
    again.restore(json.loads(json.dumps(stage.to_record())))
    assert again.to_record() == stage.to_record()
    assert [len(means) for _, means in stage.to_record()] == [2, 2]
    more = [BatchGroup(of_size(2, 4), drawn=True)]
    found = [trio.run(each.advantage, more, at) for each in (stage, again)]
    assert found[0] == found[1] != trio.run(MeasureByCapability(Hacpo()).advantage, more, at)


# --- rewards and beginnings ----------------------------------------------------------------------

WORKED = ONE_KIND.model_copy(
    update={
        "answer": ONE_KIND.answer.model_copy(update={"format": "last_line"}),
        "sampling": ONE_KIND.sampling.model_copy(update={"max_new_tokens": 64}),
    }
)
FINE, WRONG = "1+1=2\n\n", "2+2=5\n\n"


class Worker(Student):
    """Writes two steps before its answer, of which the second is false in half of the cases."""

    def _complete(self, prompt: str, sampling: Sampling, rng: Random) -> Completion:
        said = Prompt.read(prompt)
        made = super()._complete(said.question, sampling, rng)
        steps = "" if said.beginning else FINE + rng.choice((FINE, WRONG))
        ids = tuple((steps + made.text).encode())
        logprobs = tuple(-rng.random() for _ in ids)
        return replace(made, text=steps + made.text, token_ids=ids, logprobs=logprobs)


def answer(text: str) -> str:
    return text.rpartition("\n")[2]


def trained_rewards(played: Played) -> list[tuple[Sequence[Completion], tuple[float, ...]]]:
    return [
        (each.scored.group.completions, each.scored.rewards)
        for outcome in played.outcomes
        for each in outcome.batch
    ]


def by_votes(played: Played) -> bool:
    """Of four completions of one producer each has a vote."""
    for made, rewards in trained_rewards(played):
        answers = [answer(each.text) for each in made]
        best = Counter(answers).most_common(1)[0][0]
        if rewards != tuple(float(each == best) for each in answers):
            return False
    return True


def by_sure_votes(played: Played) -> bool:
    """Without bonus p ~ n / u of at most two answers; entropies of `Student` are .5, 1.5, ..."""
    for made, rewards in trained_rewards(played):
        worth = defaultdict[str, list[float]](list)
        for each in made:
            worth[answer(each.text)].append(1 - exp(-len(each.token_ids) / 2))
        told = {name: len(each) / (fmean(each) + 1e-6) for name, each in worth.items()}
        wanted = [told[answer(each.text)] / sum(told.values()) for each in made]
        if rewards != pytest.approx(wanted):
            return False
    return True


def by_flaws(played: Played) -> bool:
    """Right and sound 1, right and flawed 0, wrong -1."""
    own = [each for outcome in played.outcomes for each in outcome.own]
    for scored, (made, rewards) in zip(own, trained_rewards(played), strict=True):
        pairs = zip(made, scored.scored.rewards, strict=True)
        wanted = [(0.0 if WRONG in each.text else 1.0) if r else -1.0 for each, r in pairs]
        if list(rewards) != wanted:
            return False
    return True


def begun_again(played: Played) -> bool:
    """After the first round of sampling, what was wrong with a flaw is asked for after its last
    right step, at most twice in a round; it is trained on under that prompt."""
    asked = played.policy.asked[1::2]
    again = [Prompt.read(each.prompt) for call in asked for each in call]
    batches = [each for batch in played.policy.batches for each in batch]
    trained = [each for each in batches if Prompt.read(each.prompt).beginning]
    return (
        len(played.policy.asked) == 2 * len(played.rounds)
        and [sum(each.n for each in call) for call in asked] == [2] * len(played.rounds)
        and {each.beginning for each in again} == {FINE}
        and sum(len(each.completions) for each in trained) == len(again)
        and all(FINE not in made.text for each in trained for made in each.completions)
        and any(any(each.advantages) for each in trained)
    )


Effect = Callable[[Played], bool]
CASES: dict[str, tuple[str, str, tuple[str, ...], Effect]] = {
    "majority": ("reward", "majority", ("reward",), by_votes),
    "distribution": ("reward", "distribution, bonus=0", ("generate", "reward"), by_sure_votes),
    "flawed": ("reward", "flawed", ("reward",), by_flaws),
    "salvage": ("replay", "salvage, tries=2", ("more",), begun_again),
}


def played_with(kind: str, resume_after: int = 0) -> Played:
    family, text, *_ = CASES[kind]
    return play(config_of(WORKED, **{family: text}), Worker(0.4), 4, resume_after)


@pytest.mark.parametrize("kind", CASES)
def test_it_acts_as_its_formula_says(kind: str) -> None:
    played = played_with(kind)
    assert played.acted(kind) > 0
    assert CASES[kind][-1](played)


@pytest.mark.parametrize(("kind", "hook"), [(k, hook) for k in CASES for hook in CASES[k][2]])
def test_without_what_it_does_its_effect_is_absent(
    kind: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, text, _, is_there = CASES[kind]
    [stage] = stages_of(config_of(WORKED, **{family: text})).methods
    monkeypatch.setattr(type(stage), hook, getattr(Stage, hook))
    assert not is_there(played_with(kind))


@pytest.mark.parametrize("kind", CASES)
def test_after_a_restart_it_decides_as_it_would_have(kind: str) -> None:
    whole, again = played_with(kind), played_with(kind, resume_after=2)
    assert again.policy.asked == whole.policy.asked
    assert again.policy.batches == whole.policy.batches


def groups_of(text: str, *answers: str) -> list[BatchGroup]:
    """Own answers `text`, and of each other producer eight completions with its answer."""
    own = of_size(1, 2)
    found = []
    for place, each in enumerate((text, *answers)):
        made = replace(own.group.completions[0], text=each, logprobs=(-1e-3,), token_ids=(1,))
        count = 8 if place else 2
        group = replace(own.group, completions=(made,) * count, producer=PRODUCERS[place].peer_id)
        scored = replace(own, group=group, rewards=(0.0,) * count)
        recorded = () if place else (Recorded((1.0,)),) * count
        found.append(BatchGroup(scored, drawn=place > 0, recorded=recorded))
    return found


def test_each_producer_has_one_vote_however_much_it_says() -> None:
    at = view("t")
    [votes] = stages_of(config_of(WORKED, reward="majority")).methods
    batch = groups_of("8", "9", "8")
    found = votes.reward(batch, at)
    assert [set(each.scored.rewards) for each in found] == [{1.0}, {0.0}, {1.0}]
    outvoted = votes.reward(groups_of("8", "9", "9"), at)
    assert [set(each.scored.rewards) for each in outvoted] == [{0.0}, {1.0}, {1.0}]


def test_no_peer_is_surer_than_this_node() -> None:
    """Peers that claim log-probs near zero, beside own tokens of one nat."""
    [votes] = stages_of(config_of(WORKED, reward="distribution, bonus=0")).methods
    own, other = votes.reward(groups_of("8", "9"), view("t"))
    assert own.scored.rewards == pytest.approx((0.5,) * 2)
    assert other.scored.rewards == pytest.approx((0.5,) * 8)
    unsure = [replace(each, recorded=()) for each in groups_of("8", "9")]
    own, other = votes.reward(unsure, view("t"))  # own log-probs are as sure as the claims
    assert own.scored.rewards == pytest.approx((0.5,) * 2)


def test_entropies_that_an_engine_does_not_record_are_refused_by_name(tmp_path: Any) -> None:
    run = tmp_path / "run.toml"
    run.write_text('name = "r"\n[[environments]]\nname = "scripted_sum"\n')
    with pytest.raises(ConfigError, match="has no entropy for distribution"):
        load_config({"reward": "distribution", "engine": "vllm"}, {}, run)
    assert load_config({"reward": "majority", "engine": "vllm"}, {}, run).reward
