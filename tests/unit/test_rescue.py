"""Own groups that are all wrong take others' right completions: which, how many, and what of it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from node.config import NodeConfig, RunConfig, load_config
from node.engines.scripted import ScriptedPolicy
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.losses import guided
from node.methods.replay import EACH_MAX, Rescue, SolvedTasks, Success, rescue
from node.observe.records import RoundDone
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.rollouts import Author, Completion, FinishReason, Task, Turn
from tests.unit.simulated_pair import rounds_beside
from tests.unit.tasks_support import leave_wrong_undecided
from tests.unit.training_support import open_policy, qwen_directory

WRONG, MIXED, RIGHT = (0.0,) * 4, (0.0, 1.0, 0.0, 0.0), (1.0,) * 4
PLAIN = Rescue()


def peer(number: int) -> PeerId:
    return PeerId(f"peer-{number}")


def made(text: str, **more: object) -> Completion:
    return Completion(text, (1, 2), (-0.5, -0.5), FinishReason.STOP, 3, **more)  # type: ignore[arg-type]


def task(index: int = 1) -> Task:
    return Task("scripted_sum", "1", "{}", 7, index)


# --- what is kept ------------------------------------------------------------------------------


def test_the_shortest_right_completion_of_each_producer_is_kept_as_bare_text() -> None:
    solved = SolvedTasks()
    scored = [(made("12, no 7"), 1.0), (made("7"), 1.0), (made("8"), 0.0)]
    solved.receive(task(), peer(1), scored)
    solved.receive(task(), peer(2), [(made("seven"), 1.0)])
    bare = Completion("7", (), (), FinishReason.STOP, 0)  # no ids, no log-probs: none is believed
    assert solved.of(task()) == (
        Success(peer(1), bare),
        Success(peer(2), Completion("seven", (), (), FinishReason.STOP, 0)),
    )
    assert solved.of(task(2)) == ()
    solved.receive(task(), peer(1), [(made("just 7"), 1.0)])  # the newest takes its place
    assert [each.completion.text for each in solved.of(task())] == ["seven", "just 7"]


def test_wrong_ones_transcripts_and_copies_take_no_place() -> None:
    solved = SolvedTasks()
    turns = (Turn(Author.POLICY, 1, 2),)
    cut = replace(made("7"), finish_reason=FinishReason.LENGTH)  # no end to learn
    solved.receive(
        task(), peer(1), [(made("8"), 0.5), (made("7", segments=turns), 1.0), (cut, 1.0)]
    )
    assert len(solved) == 0
    solved.receive(task(), peer(1), [(made("7"), 1.0)])
    for copier in range(2, 12):
        solved.receive(task(), peer(copier), [(made("7"), 1.0)])
    assert [each.producer for each in solved.of(task())] == [peer(1)]
    solved.receive(task(), peer(1), [(made("9"), 0.0)])  # says nothing new
    assert [each.completion.text for each in solved.of(task())] == ["7"]


def test_ten_keys_hold_no_more_places_than_a_task_has_and_old_tasks_leave() -> None:
    solved = SolvedTasks(chars_max=20)
    for number in range(10):
        solved.receive(task(), peer(number), [(made(f"7 {number}"), 1.0)])
    assert [each.producer for each in solved.of(task())] == [peer(n) for n in range(6, 10)]
    assert len(solved.of(task())) == EACH_MAX
    solved.receive(task(2), peer(1), [(made("a" * 15), 1.0)])
    assert (len(solved), solved.of(task())) == (1, ())
    solved.receive(task(3), peer(1), [(made("a" * 21), 1.0)])
    assert len(solved) == 0


def test_keys_of_one_block_displace_each_other_and_nobody_else() -> None:
    solved = SolvedTasks()
    for number in (1, 2):
        solved.receive(task(), peer(number), [(made(f"7 {number}"), 1.0)], f"honest {number}")
    for number in range(3, 9):
        solved.receive(task(), peer(number), [(made(f"7 {number}"), 1.0)], "one block")
    assert [each.producer for each in solved.of(task())] == [peer(n) for n in (1, 2, 7, 8)]


# --- which groups are rescued ------------------------------------------------------------------

ONE = (Success(peer(1), made("7")),)
TWO = (*ONE, Success(peer(2), made("seven")))


def whole() -> Rescue:
    return Rescue(groups_share_max=1.0)


def test_only_groups_that_are_all_wrong_are_rescued_and_no_more_than_their_share() -> None:
    rewards = [WRONG, MIXED, RIGHT, WRONG, WRONG, WRONG]
    known = dict.fromkeys((0, 1, 2, 3, 4), ONE)  # of 5 nobody has solved the task
    assert set(rescue(rewards, known, Random(1), whole())) == {0, 3, 4}
    for seed in range(20):
        assert len(rescue(rewards, known, Random(seed), PLAIN)) == 3
        few = rescue(rewards, known, Random(seed), Rescue(groups_share_max=0.1))
        assert len(few) == 1
        assert few.keys() <= {0, 3, 4}
    assert rescue([], {}, Random(1), PLAIN) == {}
    assert set(rescue([WRONG], known, Random(1), PLAIN)) == {0}  # rounded up
    assert rescue([(0.5, 0.5)] * 2, known, Random(1), whole()) == {}  # wrong, but not in all
    with pytest.raises(ValueError, match="finite"):
        rescue([(math.nan, 0.0)], known, Random(1), PLAIN)


def test_a_group_takes_as_many_as_it_may_each_of_another_producer() -> None:
    rewards = [WRONG, WRONG]
    counts = {len(rescue(rewards, {0: TWO}, Random(s), PLAIN)[0]) for s in range(9)}
    assert counts == {1}
    both = rescue(rewards, {0: TWO}, Random(1), Rescue(successes_max=2))[0]
    assert {each.producer for each in both} == {peer(1), peer(2)}
    first = {rescue(rewards, {0: TWO}, Random(s), PLAIN)[0][0].producer for s in range(20)}
    assert first == {peer(1), peer(2)}
    for seed in range(20):  # who could be spared gives no more than others
        each = rescue([WRONG] * 4, dict.fromkeys(range(4), TWO), Random(seed), whole())
        given = [success.producer for successes in each.values() for success in successes]
        assert sorted(given) == [peer(1), peer(1), peer(2), peer(2)]
    again = [rescue(rewards, {0: order}, Random(3), PLAIN) for order in (TWO, TWO[::-1])]
    assert again[0] == again[1]


# --- what is learned of it ---------------------------------------------------------------------


def test_guidance_is_learned_most_where_it_is_neither_likely_nor_impossible() -> None:
    logs = torch.tensor([0.5, 0.1, 0.01, 1e-4], dtype=torch.float64).log().requires_grad_(True)
    found = guided(logs, torch.full_like(logs, 2.0), 0.1)
    assert found.each.tolist() == pytest.approx(
        [-2 * p / (p + 0.1) for p in (0.5, 0.1, 0.01, 1e-4)]
    )
    found.each.sum().backward()
    assert logs.grad is not None
    wanted = [-2 * p * 0.1 / (p + 0.1) ** 2 for p in (0.5, 0.1, 0.01, 1e-4)]
    assert logs.grad.tolist() == pytest.approx(wanted)
    assert min(logs.grad.tolist()) == logs.grad[1]  # at p = shaping
    absurd = torch.tensor([-1e9, 0.0], requires_grad=True)
    each = guided(absurd, torch.ones(2), 0.1).each
    each.sum().backward()
    assert torch.isfinite(each).all()
    assert absurd.grad is not None
    assert torch.isfinite(absurd.grad).all()


@pytest.mark.parametrize("loss", ["sapo", "dapo", "m2po", "gepo"])
def test_the_trainer_learns_guidance_whatever_its_loss(tmp_path, loss: str) -> None:
    directory = qwen_directory(tmp_path)
    text = Completion("7", (), (), FinishReason.STOP, 0)

    def after(shaping: float, value: float = 1.0) -> tuple[float, float, TrainReport]:
        policy = open_policy(directory)
        spec = TrainerSpec(str(directory), device="cpu", learning_rate=1e-3, warm_up_updates=0)
        more = "" if loss == "sapo" else ", unknown_share_max=0"  # guidance has none to know
        trainer = GroupTrainer(policy, replace(spec, loss=loss + more, step_guard=False), 4096)
        both = (_own(trainer), text)
        group = TrainingGroup("1+6=", both, (-value, value), True, guided=1, shaping=shaping)
        before = sum(trainer.logprobs([group])[0][1])
        report = trainer.train([group])
        return before, sum(trainer.logprobs([group])[0][1]), report

    before, then, report = after(0.1)
    assert then > before
    assert report.trained_tokens > 0
    _, unlearned, _ = after(0.1, value=-1.0)  # the control: the other way round
    assert unlearned < then


def test_guidance_that_does_not_fit_leaves_nothing_to_learn(tmp_path) -> None:
    directory = qwen_directory(tmp_path)
    spec = TrainerSpec(str(directory), device="cpu", completion_chars_max=200)
    trainer = GroupTrainer(open_policy(directory), spec, 4096)
    for text, trained in (("7", True), ("7" * 300, False)):
        guide = Completion(text, (), (), FinishReason.STOP, 0)
        made_here = (*[_own(trainer)] * 4, guide)
        worth = (-0.5, -0.5, -0.5, -0.5, 2.0)
        group = TrainingGroup("1+6=", made_here, worth, True, guided=1, shaping=0.1)
        assert (trainer.train([group]).trained_tokens > 0) is trained


def _own(trainer: GroupTrainer) -> Completion:
    ids = tuple(trainer.policy.encode_prompt("9"))
    return Completion(
        trainer.policy.decode(list(ids)), ids, (-1.0,) * len(ids), FinishReason.LENGTH, 0
    )


# --- on nodes ----------------------------------------------------------------------------------

RUN = RunConfig.model_validate(
    {
        "name": "common",
        "environments": [{"name": "scripted_sum", "parameters": {"max": 9}}],
        "sampling": {"max_new_tokens": 4},
        "held_out": {"tasks": 4},
        "common": {"tasks": 16, "share": 1.0},
    }
)
CONFIG = NodeConfig(
    run=RUN, local_groups=4, external_groups=2, group_size=4, rounds=30, evaluate_every_rounds=0
)


class Kept(ScriptedPolicy):
    """Keeps what it was given to train on, and learns nothing of it."""

    def __init__(self, skill: float) -> None:
        super().__init__(skill=skill, generate_s=0.5, train_s=0.5)
        self.batches: list[list[TrainingGroup]] = []

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        skill = self.skill
        report = await super().train(groups)
        self.skill = skill
        self.batches.append(list(groups))
        return report


def lives(config: NodeConfig) -> tuple[list[RoundDone], Kept]:
    """A node that solves nothing, beside one that solves all."""
    hopeless = Kept(0.0)
    return rounds_beside(config, hopeless, CONFIG, Kept(1.0)), hopeless


def test_a_node_that_solves_nothing_learns_from_one_that_does() -> None:
    plain, alone = lives(CONFIG)
    assert sum(each.rescued_groups for each in plain) == 0
    assert not any(any(group.advantages) for batch in alone.batches for group in batch)
    rounds, rescued = lives(CONFIG.model_copy(update={"replay": Rescue(successes_max=2)}))
    later = rounds[20:]
    assert [each.rescued_groups for each in later] == [2] * len(later)  # half of four
    guided_ = [group for group in rescued.batches[-1] if group.guided]
    assert len(guided_) == 2
    for group in guided_:
        assert (group.guided, group.shaping, group.own_tokens) == (1, 0.1, True)  # of one producer
        assert len(group.completions) == 5
        assert group.completions[-1].token_ids == ()
        assert max(group.advantages[:-1]) < 0 < group.advantages[-1]
        assert sum(group.advantages) == pytest.approx(0.0, abs=1e-6)


def test_what_was_not_decided_is_neither_rescued_nor_learned(monkeypatch) -> None:
    """A judge that gave nothing away has not found a group wrong."""
    leave_wrong_undecided(monkeypatch)
    rounds, _ = lives(CONFIG.model_copy(update={"replay": Rescue()}))
    assert sum(each.rescued_groups for each in rounds) == 0


def test_what_cannot_rescue_says_so(tmp_path) -> None:
    run = tmp_path / "run.toml"
    head = 'name = "r"\n[[environments]]\nname = "scripted_sum"\n'
    run.write_text(head)
    with pytest.raises(ConfigError, match=r"no tasks that come again: give it common\.share"):
        load_config({"replay": "rescue"}, {}, run)
    run.write_text(head + "[common]\nshare = 0.5\n")
    assert load_config({"replay": "rescue, shaping=0.2"}, {}, run).replay == (Rescue(shaping=0.2),)
    for name, value in (("replay", "rescue"), ("control", "vade"), ("generate", "speculative")):
        with pytest.raises(ConfigError, match=f"makes no groups for {value}"):
            load_config({name: value, "local_groups": "0"}, {}, run)
    with pytest.raises(ConfigError, match="fetches nothing for rescue"):
        load_config({"replay": "rescue", "external_groups": "0"}, {}, run)
