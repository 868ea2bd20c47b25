"""The guard over a trainer's steps, and the clip that follows the median of gradients."""

import math
from dataclasses import replace

import pytest
import torch

from node.interfaces.trainer import DamagedCheckpoint, TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.observe.figures import guard_note
from node.policies import checkpoint
from node.policies.policy import Policy
from node.train.rows import PROBE_ROWS_MAX, PROBE_TOKENS_MAX, Row, Unit, probe
from node.train.step_guard import (
    CAUTION_UPDATES,
    FIRST_MOVE_MAX,
    MOVE_MIN,
    SEEN_MIN,
    StepGuard,
    take_back,
)
from node.train.trainer import GroupTrainer
from tests.unit.monitor_records import round_done
from tests.unit.training_support import group, open_policy, qwen_directory

SPEC = TrainerSpec("test", learning_rate=1e-4)
MANY = 100_000  # tokens: one micro-batch


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return qwen_directory(tmp_path_factory.mktemp("model"))


def healthy(policy: Policy, number: int) -> list[TrainingGroup]:
    return [
        group(policy, f"{number}+1=", ["2", "13", "4"], [1.0, -1.5, 0.5]),
        group(policy, "say:", ["a", "bb", "ccc"], [0.5, -1.0, 0.5]),
    ]


def trained(directory, updates: int = 8, **settings) -> GroupTrainer:
    """A trainer after some healthy updates."""
    policy = open_policy(directory)
    trainer = GroupTrainer(policy, replace(SPEC, **settings), MANY)
    for number in range(updates):
        report = trainer.train(healthy(policy, number))
        assert report.steps_taken_back == 0
    return trainer


def state(trainer: GroupTrainer) -> dict[str, torch.Tensor]:
    """Weights and second moments."""
    found = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    for place, (_, each) in enumerate(trainer.optimizer.state.items()):
        found[f"square {place}"] = each["exp_avg_sq"].clone()
    return found


def planted(policy: Policy) -> list[TrainingGroup]:
    """What no batch of a healthy step_guard looks like."""
    return [group(policy, "what now?", ["zzzz", "qqqq"], [1000.0, -1000.0])]


def bad_step(trainer: GroupTrainer):
    """One update at a rate at which it falls."""
    trainer.optimizer.param_groups[0]["lr"] = 0.3
    report = trainer.train(planted(trainer.policy))
    trainer.optimizer.param_groups[0]["lr"] = SPEC.learning_rate
    return report


def likelihood(trainer: GroupTrainer) -> float:
    """The mean log-prob of what it was trained to answer."""
    [rows] = trainer.logprobs([group(trainer.policy, "3+1=", ["2", "4"], [1.0, 1.0])])
    return sum(map(sum, rows)) / sum(map(len, rows))


def test_a_planted_step_falls_without_the_guard_and_not_with_it(directory):
    loose = trained(directory, step_guard=False)
    before = likelihood(loose)
    report = bad_step(loose)
    assert math.isnan(report.step_kl)
    assert report.steps_taken_back == 0
    assert likelihood(loose) < before - 1.0

    guarded = trained(directory)
    earlier, version = state(guarded), guarded.policy_version
    report = bad_step(guarded)
    assert report.steps_taken_back == 1
    assert report.step_kl > 0.05
    assert (report.trained_tokens, report.policy_version, report.rate_scale) == (0, version, 0.5)
    assert likelihood(guarded) == pytest.approx(before, abs=1e-4)
    for name, value in state(guarded).items():
        assert torch.allclose(value, earlier[name], rtol=1e-4, atol=2e-7), name
    for each in guarded.optimizer.state.values():
        assert not each["exp_avg"].any()
        assert float(each["step"]) == version
    assert all(p.grad is None for p in guarded.policy.model.parameters())


def test_healthy_training_is_to_the_bit_what_it_is_without(directory):
    with_guard, without = trained(directory), trained(directory, step_guard=False)
    assert with_guard.policy_version == without.policy_version == 8
    left, right = state(with_guard), state(without)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_after_a_bad_step_the_rate_is_halved_for_some_updates(directory):
    trainer = trained(directory)
    bad_step(trainer)
    scales = [
        trainer.train(healthy(trainer.policy, number)).rate_scale
        for number in range(CAUTION_UPDATES + 1)
    ]
    assert scales == [0.5] * (CAUTION_UPDATES - 1) + [1.0, 1.0]


def test_the_way_back_is_that_of_adam(directory):
    trainer = trained(directory, updates=3)
    earlier = state(trainer)
    for weight in trainer.policy.model.parameters():
        weight.grad = torch.ones_like(weight)
    trainer.optimizer.step()
    assert any(not torch.equal(value, earlier[name]) for name, value in state(trainer).items())
    take_back(trainer.optimizer)
    for name, value in state(trainer).items():
        assert torch.allclose(value, earlier[name], rtol=1e-3, atol=2e-7), name


def test_several_updates_end_with_the_one_that_is_taken_back(directory):
    trainer = trained(directory, updates_per_batch=3)
    version = trainer.policy_version
    assert version == 8 * 3
    report = bad_step(trainer)
    assert (report.policy_version, report.steps_taken_back) == (version, 1)


# --- the way back, and a lower rate ---------------------------------------------------------------


def kept_and_left(directory, tmp_path) -> tuple[GroupTrainer, dict[str, torch.Tensor]]:
    """A trainer that went on from what it saved, and what that was."""
    trainer = trained(directory)
    trainer.save(tmp_path)
    best = state(trainer)
    for number in range(3):
        trainer.train(healthy(trainer.policy, 50 + number))
    return trainer, best


def test_back_at_the_best_there_is_no_momentum_and_the_version_rises(directory, tmp_path):
    trainer, best = kept_and_left(directory, tmp_path)
    assert trainer.policy_version == 11
    assert any(not torch.equal(value, best[name]) for name, value in state(trainer).items())
    trainer.roll_back(tmp_path)
    assert all(torch.equal(value, best[name]) for name, value in state(trainer).items())
    assert trainer.policy_version == 12
    for each in trainer.optimizer.state.values():
        assert not each["exp_avg"].any()
        assert float(each["step"]) == 8
    assert len(trainer.step_guard.norms) == 8  # what the fall did to the bounds is gone with it
    assert trainer.train(healthy(trainer.policy, 60)).policy_version == 13


def test_random_numbers_go_on_after_the_way_back(directory, tmp_path):
    trainer, _ = kept_and_left(directory, tmp_path)
    torch.rand(1)
    numbers = torch.get_rng_state()
    trainer.roll_back(tmp_path)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_the_way_back_to_before_the_first_update(directory, tmp_path):
    trainer = GroupTrainer(open_policy(directory), SPEC, MANY)
    trainer.save(tmp_path)
    best = state(trainer)
    trainer.train(healthy(trainer.policy, 1))
    trainer.roll_back(tmp_path)
    assert trainer.policy_version == 2
    assert all(torch.equal(value, best[name]) for name, value in state(trainer).items())
    assert trainer.train(healthy(trainer.policy, 2)).policy_version == 3


def test_a_share_of_the_rate_is_a_share_of_the_step(directory):
    def step(rate_share: float) -> torch.Tensor:
        trainer = trained(directory)
        trainer.rate_share = rate_share
        before = state(trainer)
        trainer.train(healthy(trainer.policy, 9))
        after = {name: v for name, v in state(trainer).items() if not name.startswith("square")}
        return torch.cat([(value - before[name]).flatten() for name, value in after.items()])

    whole, half = step(1.0), step(0.5)
    assert float(whole.norm()) > 0
    assert float(half.norm() / whole.norm()) == pytest.approx(0.5, rel=1e-2)
    assert trained(directory).optimizer.param_groups[0]["lr"] == SPEC.learning_rate


# --- bounds ----------------------------------------------------------------------------------


def test_the_bound_follows_the_median_of_the_steps_that_stand():
    step_guard = StepGuard()
    assert step_guard.move_bound() == FIRST_MOVE_MAX
    for move in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3):
        assert step_guard.takes(move)
    assert step_guard.move_bound() == pytest.approx(3e-2)
    assert not step_guard.takes(3.1e-2)
    assert step_guard.move_bound() == pytest.approx(3e-2)  # what was taken back is not among them
    for _ in range(SEEN_MIN + 1):
        assert step_guard.takes(1e-6)
    assert step_guard.move_bound() == MOVE_MIN


def test_what_is_not_a_number_does_not_stand():
    assert not StepGuard().takes(math.nan)
    assert not StepGuard().takes(math.inf)


def test_two_bad_steps_in_a_row_halve_the_rate_twice_and_it_rises_again():
    step_guard = StepGuard()
    assert not step_guard.takes(1.0)
    assert not step_guard.takes(1.0)
    assert step_guard.caution == 0.25
    found = []
    for _ in range(2 * CAUTION_UPDATES):
        step_guard.takes(1e-4)
        found.append(step_guard.caution)
    assert found == [0.25] * 9 + [0.5] * 10 + [1.0]


def test_the_clip_follows_the_median_of_the_norms():
    step_guard = StepGuard()
    for norm in (0.1, 0.2, 0.3, 0.4):
        assert step_guard.norm_bound(1.0) == 1.0
        step_guard.note_norm(norm)
    step_guard.note_norm(math.inf)
    assert step_guard.norm_bound(1.0) == 1.0  # four are not enough
    step_guard.note_norm(0.15)
    assert step_guard.norm_bound(1.0) == pytest.approx(0.6)
    assert step_guard.norm_bound(0.5) == 0.5
    for _ in range(40):
        step_guard.note_norm(0.0)
    assert step_guard.norm_bound(1.0) == 1.0


@pytest.mark.parametrize("clips", [True, False])
def test_a_gradient_longer_than_others_is_cut_to_thrice_the_median(directory, clips):
    trainer = trained(directory, clips_to_median=clips, grad_norm_max=1e6, step_guard=False)
    usual = sorted(trainer.step_guard.norms)
    norms = []
    clip = trainer._clip_gradient

    def seen(limit: float) -> float:
        found = clip(limit)
        squares = sum(float(p.grad.square().sum()) for p in trainer.policy.model.parameters())
        norms.append(math.sqrt(squares))
        return found

    trainer._clip_gradient = seen  # type: ignore[method-assign]
    report = trainer.train(planted(trainer.policy))
    bound = 3 * (usual[3] + usual[4]) / 2 if clips else report.grad_norm
    assert report.grad_norm > 10 * usual[-1]
    assert norms == [pytest.approx(bound, rel=1e-3)]


# --- what is measured, kept and told ----------------------------------------------------------


def rows(count: int, own: bool, length: int = 1) -> list[Row]:
    return [Row([1] * length, 1.0, own) for _ in range(count)]


def test_steps_are_measured_on_own_rows_from_all_over_the_batch():
    many = [[Unit([1, 2], rows(50, own=True)), Unit([1, 2], rows(50, own=False))]]
    many.append([Unit([1, 2], rows(50, own=True))])
    found = probe(many)
    counts = [[len(unit.rows) for unit in batch] for batch in found]
    assert counts == [[8, 0], [7]]  # every seventh of a hundred
    assert sum(map(sum, counts)) <= PROBE_ROWS_MAX
    foreign = probe([[Unit([1, 2], rows(3, own=False))]])
    assert len(foreign[0][0].rows) == 3
    long = probe([[Unit([1, 2], rows(10, own=True, length=PROBE_TOKENS_MAX // 2))]])
    assert len(long[0][0].rows) == 2
    longest = probe([[Unit([1, 2], rows(2, own=True, length=PROBE_TOKENS_MAX + 1))]])
    assert len(longest[0][0].rows) == 1


def test_a_checkpoint_keeps_the_course(directory, tmp_path):
    trainer = trained(directory)
    bad_step(trainer)
    trainer.save(tmp_path)
    resumed = GroupTrainer(open_policy(directory), SPEC, MANY)
    resumed.resume(tmp_path)
    assert resumed.step_guard == trainer.step_guard
    assert resumed.step_guard.caution == 0.5
    ours, theirs = (each.train(healthy(each.policy, 99)) for each in (trainer, resumed))
    assert replace(ours, seconds=0.0) == replace(theirs, seconds=0.0)


def test_a_checkpoint_of_before_there_was_a_course_begins_one(directory, tmp_path):
    trainer = trained(directory, updates=1)
    checkpoint.save(tmp_path, trainer.policy, trainer.optimizer, 1)
    trainer.resume(tmp_path)
    assert trainer.step_guard == StepGuard()


def test_a_damaged_course_is_a_damaged_checkpoint(directory, tmp_path):
    trainer = trained(directory, updates=1)
    step_guard = {**trainer.step_guard.to_record(), "norms": ["x"]}
    checkpoint.save(tmp_path, trainer.policy, trainer.optimizer, 1, step_guard)
    with pytest.raises(DamagedCheckpoint, match=r"^checkpoint damaged"):
        trainer.resume(tmp_path)


def test_status_says_what_the_guard_did_until_it_is_over():
    quiet = round_done(1)
    assert guard_note(quiet) is None
    acted = replace(quiet, steps_taken_back=1, step_kl=0.0123, rate_scale=0.5)
    assert guard_note(acted) == (
        "an update moved the policy too far (by 0.012 nats a token) and was taken back; "
        "it learns at 50.0 % of its rate for a while"
    )
    later = guard_note(replace(quiet, rate_scale=0.5))
    assert later is not None
    assert "some rounds ago" in later
