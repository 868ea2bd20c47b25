"""Methods of rewards and advantages in a round: each acts, what is trained on is what its formula
says, and it goes on after a restart as if there had been none."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from random import Random
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio

from node.config import RunConfig, load_config
from node.envs.base import Problem
from node.envs.games import GuessNumber
from node.envs.tool_use import FileLookup
from node.interfaces.engine import Context, Outcome, Recorded, Request, Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup
from node.methods.advantages import Hacpo, grpo_advantages
from node.methods.groups import Advantages
from node.methods.rewards import CrossValue
from node.methods.ridge import Ridge, sketched
from node.observe.records import RoundDone
from node.stages.advantage import MeasureByCapability, MeasureByPartner
from node.stages.stage import BatchGroup, Stage, View
from node.stages.table import stages_of
from node.verify.assignment import assigned_task
from node.verify.task_choice import TaskChoice
from node.verify.verifier import InlineVerifier, Verifier
from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.rollouts import Completion, FinishReason, Task
from tests.pool_samples import PRODUCERS
from tests.unit.simulated_pair import rounds_beside
from tests.unit.stages_support import ONE_KIND, Played, Student, config_of, play
from tests.unit.tasks_support import ALICE, make_run
from tests.unit.test_learner_batch import of_size, view
from tests.unit.test_rescue import CONFIG, Kept
from tests.unit.test_tasks_verifier import with_both

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


# --- turns ---------------------------------------------------------------------------------------

GUESSES = RunConfig.model_validate(
    {"name": "g", "environments": [{"name": "guess_number"}], "held_out": {"tasks": 2}}
)


class Guesser(Student):
    """Guesses any number; tokens are a letter each, and an end."""

    def _complete(self, prompt: str, sampling: Sampling, rng: Random) -> Completion:
        text = str(rng.randint(1, 15))
        ids = (*text.encode(), 0)
        return Completion(text, ids, (-0.5,) * len(ids), FinishReason.STOP, self.version)

    async def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, noise: float = 0.0
    ) -> list[Outcome]:
        prompts = [each.prompt for each in requests]
        return list(map(Outcome, await self.generate(prompts, requests[0].n, sampling, seed)))

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        rng = Random(seed)
        return [self._complete(each.prompt, sampling, rng) for each in contexts]


def by_turn(made: Completion) -> list[bool]:
    """Whether each guess is within what the replies before it leave open."""
    low, high, found = 1, 15, []
    parts = [text for _, text in made.parts()]
    for guess, reply in zip(map(int, parts[::2]), [*parts[1::2], ""], strict=True):
        found.append(low <= guess <= high)
        low = max(low, guess + 1) if reply.startswith("higher") else low
        high = min(high, guess - 1) if reply.startswith("lower") else high
    return found


def ui_s1(right: list[list[bool]]) -> list[list[float]]:
    returns = []
    for each in right:
        later, values = 0.0, list[float]()
        for is_right in reversed(each):
            later = is_right + 0.5 * later * is_right
            values.insert(0, later)
        returns.append(values)
    mean = fmean(is_right for each in right for is_right in each)
    found = []
    for each, values in zip(right, returns, strict=True):
        row = []
        for place, value in enumerate(values):
            there = [other[place] for other in returns if place < len(other)]
            of_turn = value - fmean(there) if len(there) > 1 else 0.0
            row.append(of_turn + fmean(each) - mean)
        found.append(row)
    return found


def scrl(right: list[list[bool]]) -> list[list[float]]:
    most = max(map(len, right))
    solved = [[all(each[: k + 1]) and k < len(each) for k in range(most)] for each in right]
    columns = [grpo_advantages(list(map(float, column))) for column in zip(*solved, strict=True)]
    return [[columns[k][at] for k in range(len(each))] for at, each in enumerate(right)]


def tokens_have(played: Played, formula: Callable[[list[list[bool]]], list[list[float]]]) -> bool:
    for group in (each for batch in played.policy.batches for each in batch):
        worth = formula(list(map(by_turn, group.completions)))
        wanted = [
            [value for text, value in zip(made.parts()[::2], values, strict=True)
             for _ in range(len(text[1]) + 1)]
            for made, values in zip(group.completions, worth, strict=True)
        ]  # fmt: skip
        found = list(map(list, group.token_advantages))
        if len(found) != len(wanted) or any(
            a != pytest.approx(b, abs=1e-9) for a, b in zip(found, wanted, strict=True)
        ):
            return False
    return True


TURNS = {"two_levels": ui_s1, "sub_problems": scrl}


def guessed(kind: str) -> Played:
    return play(config_of(GUESSES, advantage=kind), Guesser(), 3)


@pytest.mark.parametrize("kind", TURNS)
def test_each_turns_tokens_have_the_turns_advantage(kind: str) -> None:
    played = guessed(kind)
    assert played.acted(kind) > 0
    assert tokens_have(played, TURNS[kind])


NO_TOKENS: dict[str, Any] = {"weigh": Stage.weigh}


@pytest.mark.parametrize("planted", [NO_TOKENS, {**NO_TOKENS, "advantage": _grpo}])
@pytest.mark.parametrize("kind", TURNS)
def test_without_what_it_does_all_tokens_are_alike(
    kind: str, planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    [stage] = stages_of(config_of(GUESSES, advantage=kind)).methods
    for hook, nothing in planted.items():
        monkeypatch.setattr(type(stage), hook, nothing)
    assert not tokens_have(guessed(kind), TURNS[kind])


def test_others_transcripts_have_one_advantage() -> None:
    [stage] = stages_of(config_of(GUESSES, advantage="two_levels")).methods
    at = replace(view("t"), verifier=InlineVerifier(GUESSES))
    batch = [BatchGroup(of_size(1, 4), drawn=True)]
    worth = trio.run(stage.advantage, batch, at)
    assert worth == [grpo_advantages(of_size(1, 4).rewards)]
    assert stage.weigh(batch, worth, at) == (batch, worth)


def test_a_transcript_with_an_undecided_turn_is_left_out() -> None:
    """Nobody knows that the turn is wrong; the others are compared with each other."""

    async def score(*_: object) -> list[tuple[float | None, ...]]:
        await trio.lowlevel.checkpoint()
        return [(1.0, 0.0, None, 0.0)]

    [stage] = stages_of(config_of(GUESSES, advantage="two_levels")).methods
    at = replace(view("t"), verifier=SimpleNamespace(score=score))  # type: ignore[arg-type]
    scored = of_size(1, 4)
    batch = [BatchGroup(replace(scored, own=True))]
    worth = trio.run(stage.advantage, batch, at)
    assert worth == [pytest.approx((4 / 3, -2 / 3, None, -2 / 3))]
    [weighed], _ = stage.weigh(batch, worth, at)
    count = len(scored.group.completions[0].token_ids)
    assert [len(each) for each in weighed.token_advantages] == [count, count, 0, count]


def test_an_environment_that_tells_nothing_of_turns_is_refused_by_name(tmp_path: Any) -> None:
    run = tmp_path / "run.toml"
    head = 'name = "r"\n[[environments]]\nname = '
    for name in ("text_maze", "scripted_sum"):
        run.write_text(f'{head}"{name}"\n')
        with pytest.raises(ConfigError, match=f"{name} says nothing of single turns"):
            load_config({"advantage": "two_levels"}, {}, run)
    for name in ("guess_number", "calculator_sum", "file_lookup", "python_repair"):
        run.write_text(f'{head}"{name}"\n')
        assert str(load_config({"advantage": "sub_problems"}, {}, run).advantage) == "sub_problems"


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (["8"], 1),
        (["16"], 0),
        (["x"], 0),
        (["8", "8"], 0),
        (["8", "x", "9"], 1),
        (["8", "7"], 0),
        (["8", "12", "13"], 0),
        (["8", "12", "10"], 1),
    ],
)
def test_a_guess_is_right_while_replies_leave_it_open(turns: list[str], wanted: float) -> None:
    """The number is ten."""
    problem = Problem(Task("guess_number", "1", "{}", 0, 0), "", "10", {"max": 15, "tries": 4})
    assert GuessNumber().of_turn(problem, turns) == wanted


def test_a_verifiers_process_judges_turns_as_well() -> None:
    run = make_run({"name": "guess_number"})
    task = assigned_task(run, ALICE, 0)
    right_one = GuessNumber().problem(task).answer
    wrong = next(str(n) for n in range(1, 16) if str(n) != right_one)
    reply = "higher, 3 left" if int(right_one) > int(wrong) else "lower, 3 left"
    said = [(True, [(True, wrong)]), (True, [(True, wrong), (False, reply), (True, wrong)])]

    async def body(verifier: Verifier) -> None:
        assert await verifier.score([task], [said], "turn") == [(1.0, 0.0)]
        assert await verifier.score([task], [said]) == [(0.0, 0.0)]

    with_both(run, body)


def test_a_call_is_right_at_its_place() -> None:
    source = FileLookup()
    problem = source.problem(Task("file_lookup", "1", "{}", 0, 0))
    first, second, answer = source.right(problem)
    assert source.of_turn(problem, [first]) == 1
    assert source.of_turn(problem, ["no", second]) == 1
    assert source.of_turn(problem, [second]) == 0
    assert source.of_turn(problem, [first, second, answer, answer]) == 0


# --- cross value ---------------------------------------------------------------------------------


class Felt(Student):
    """Its states tell how long a completion is and whether it is right."""

    async def features(self, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]]:
        await trio.lowlevel.checkpoint()
        return [[felt(g.prompt, made.text) for made in g.completions] for g in groups]


def felt(prompt: str, text: str) -> tuple[float, ...]:
    return 1.0, float(len(text)), float(text == str(sum(map(int, prompt[:-1].split("+")))))


CROSS = "cross_value, pairs_min=16, width=4, kept=0.5"


def by_partner(played: Played) -> bool:
    """Four completions are two pairs; a batch has sixteen rows, learned once it was judged."""
    squares, targets = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for number, batch in enumerate(played.policy.batches):
        weights = torch.linalg.solve(squares + 0.01 * torch.eye(5), targets)
        squares, targets = squares / 2, targets / 2
        for group in batch:
            rewards = right(group)
            rows = [
                torch.tensor(sketched(felt(group.prompt, each.text), 4), dtype=torch.float64)
                for each in group.completions
            ]
            told = [min(1.0, max(0.0, float(row @ weights))) for row in rows]
            expected = [told[1], told[0], told[3], told[2]] if number else [fmean(rewards)] * 4
            wanted = [r - e for r, e in zip(rewards, expected, strict=True)]
            if list(group.advantages) != pytest.approx(wanted, abs=1e-6):
                return False
            for one, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
                squares += torch.outer(rows[other], rows[other])
                targets += rows[other] * rewards[one]
    return True


def felt_rounds(resume_after: int = 0) -> Played:
    config = config_of(ONE_KIND, advantage=CROSS)
    return play(config, Felt(0.6), 4, resume_after)


def test_a_completion_is_measured_by_what_its_partner_lets_expect() -> None:
    played = felt_rounds()
    assert played.acted("cross_value") == 3 * 16
    assert by_partner(played)
    assert felt_rounds(resume_after=2).policy.batches == played.policy.batches


def test_without_earlier_pairs_the_mean_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasureByPartner, "advantage", _grpo)
    assert not by_partner(felt_rounds())
    monkeypatch.undo()
    monkeypatch.setattr(MeasureByPartner, "restore", Stage.restore)
    assert not by_partner(felt_rounds(resume_after=2))


def test_an_odd_one_has_the_first_as_its_partner_and_a_skipped_one_tells_nothing() -> None:
    stage = MeasureByPartner(CrossValue(width=2, pairs_min=1, ridge=1e-9, kept=1.0))
    trainer = SimpleNamespace()
    at = replace(view("t"), trainer=trainer)
    told: list[list[tuple[float, ...]]] = [[(1.0,)], [(1.0,)], [()]]

    async def features(_: object) -> list[list[tuple[float, ...]]]:
        return told

    trainer.features = features
    three = BatchGroup(of_size(1, 3))  # rewards 0, 1, 0
    first = trio.run(stage.advantage, [three], at)
    assert first == [pytest.approx((-1 / 3, 2 / 3, -1 / 3))]  # nothing is known
    # what (1.0,) let expect: 1, 0 and, as the first is the third's partner, 0
    second = trio.run(stage.advantage, [three], at)
    assert second == [pytest.approx((0 - 1 / 3, 1 - 1 / 3, 0 - 1 / 3), abs=1e-6)]


def test_a_ridge_regression_is_as_solved_directly() -> None:
    rng = Random(1)
    rows = [[rng.gauss(0, 1) for _ in range(6)] for _ in range(20)]
    targets = [rng.random() for _ in rows]
    ridge = Ridge(6)
    for row, target in zip(rows, targets, strict=True):
        ridge.add(row, target)
    x, y = torch.tensor(rows, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)
    wanted = torch.linalg.solve(x.T @ x + 0.3 * torch.eye(6, dtype=torch.float64), x.T @ y)
    assert ridge.weights(0.3) == pytest.approx(wanted.tolist())
    assert Ridge(3).weights(0.01) == [0.0] * 3
    with pytest.raises(ValueError, match="another width"):
        Ridge(5).restore(ridge.to_record())


def test_states_of_any_length_have_one_width_and_stay_apart() -> None:
    long = [float(at) for at in range(900)]
    found = sketched(long, 64)
    assert len(found) == 65
    assert sum(each**2 for each in found[:-1]) == pytest.approx(1.0)
    assert found == sketched(long, 64) != sketched(long[::-1], 64)
    assert sketched([0.0] * 3, 2) == [0.0, 0.0, 1.0]


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
        scored = replace(own, group=group, rewards=(0.0,) * count, own=place == 0)
        recorded = () if place else (Recorded((1.0,)),) * count
        found.append(BatchGroup(scored, drawn=place > 0, recorded=recorded))
    return found


def with_voices(voice_of: Callable[[PeerId], str] = str) -> View:
    return replace(view("t"), choice=TaskChoice(WORKED, None, voice_of))


def test_each_producer_has_one_vote_however_much_it_says() -> None:
    at = with_voices()
    [votes] = stages_of(config_of(WORKED, reward="majority")).methods
    batch = groups_of("8", "9", "8")
    found = votes.reward(batch, at)
    assert [set(each.scored.rewards) for each in found] == [{1.0}, {0.0}, {1.0}]
    outvoted = votes.reward(groups_of("8", "9", "9"), at)
    assert [set(each.scored.rewards) for each in outvoted] == [{0.0}, {1.0}, {1.0}]
    # both others have addresses in one block, and share a vote
    shared = votes.reward(groups_of("8", "9", "9"), with_voices(lambda _: "block"))
    assert [set(each.scored.rewards) for each in shared] == [{1.0}, {0.0}, {0.0}]


def test_no_peer_is_surer_than_this_node() -> None:
    """Peers that claim log-probs near zero, beside own tokens of one nat."""
    [votes] = stages_of(config_of(WORKED, reward="distribution, bonus=0")).methods
    own, other = votes.reward(groups_of("8", "9"), with_voices())
    assert own.scored.rewards == pytest.approx((0.5,) * 2)
    assert other.scored.rewards == pytest.approx((0.5,) * 8)
    unsure = [replace(each, recorded=()) for each in groups_of("8", "9")]
    own, other = votes.reward(unsure, with_voices())  # own log-probs are as sure as the claims
    assert own.scored.rewards == pytest.approx((0.5,) * 2)


def test_entropies_that_an_engine_does_not_record_are_refused_by_name(tmp_path: Any) -> None:
    run = tmp_path / "run.toml"
    run.write_text('name = "r"\n[[environments]]\nname = "scripted_sum"\n')
    with pytest.raises(ConfigError, match="has no entropy for distribution"):
        load_config({"reward": "distribution", "engine": "vllm"}, {}, run)
    served = {"engine": "openai", "engine_url": "http://127.0.0.1:1/v1"}
    with pytest.raises(ConfigError, match="has no features for cross_value"):
        load_config({"advantage": "cross_value", **served}, {}, run)
    assert load_config({"advantage": "cross_value", "engine": "vllm"}, {}, run).advantage
    assert load_config({"reward": "majority", "engine": "vllm"}, {}, run).reward
