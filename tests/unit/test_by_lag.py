"""A report's figures by the age of the versions that tokens come from."""

import math
from dataclasses import replace

import pytest
import torch

from node.interfaces.trainer import LagFigures
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import losses
from node.observe.figures import done_lines
from node.train import frames
from node.train.trainer import LAGS_MAX, GroupTrainer
from tests.unit.monitor_records import snapshot
from tests.unit.test_reporting import STEP
from tests.unit.training_support import group, open_policy, qwen_directory

NOW = 40


def aged(policy, ages, off=0.0):
    """One group for each age, with log-probs that are `off` nats times the age from the policy's.
    Signs alternate, so that weights differ."""
    spec = TrainerSpec("x")
    made = []
    for age in ages:
        one = group(policy, f"{age}+1=", ["234", "345"], [1.0, -1.0])
        told = GroupTrainer(policy, spec, 4096).logprobs([one])[0]
        completions = tuple(
            replace(
                each,
                policy_version=NOW - age,
                logprobs=tuple(min(0.0, x - off * age * (i % 2)) for i, x in enumerate(values)),
            )
            for each, values in zip(one.completions, told, strict=True)
        )
        made.append(replace(one, completions=completions))
    return made


def trained(tmp_path, ages, off=0.0, loss="sapo"):
    policy = open_policy(qwen_directory(tmp_path / "a"))
    groups = aged(policy, ages, off)
    trainer = GroupTrainer(policy, TrainerSpec("x", loss=loss, updates_per_batch=1), 4096)
    trainer.policy_version = NOW
    return trainer.train(groups), groups


def test_each_age_has_the_figures_of_its_tokens(tmp_path):
    report, groups = trained(tmp_path, [0, 3, 9], off=0.2)
    assert [each.lag for each in report.by_lag] == [0, 3, 9]
    assert sum(each.tokens for each in report.by_lag) == report.trained_tokens
    shares = [each.effective_share for each in report.by_lag]
    assert shares[0] == pytest.approx(1.0, abs=1e-4)
    assert 1.0 > shares[1] > shares[2] > 0.0
    policy = open_policy(tmp_path / "a")
    for one, each in zip(groups, report.by_lag, strict=True):
        now = GroupTrainer(policy, TrainerSpec("x"), 4096).logprobs([one])[0]
        ours = torch.tensor([x for row in now for x in row])
        theirs = torch.tensor([x for completion in one.completions for x in completion.logprobs])
        assert each.effective_share == pytest.approx(
            losses.mismatch(ours, theirs).effective_share, rel=1e-3
        )


def test_the_whole_is_the_mean_where_there_is_one_age(tmp_path):
    report, _ = trained(tmp_path, [5], off=0.1, loss="gspo")
    (only,) = report.by_lag
    assert only.effective_share == pytest.approx(report.effective_share)
    assert (only.clip_fraction, only.mask_fraction) == pytest.approx(
        (report.clip_fraction, report.mask_fraction)
    )


def test_ages_are_bounded_and_foreign_texts_have_none(tmp_path):
    report, groups = trained(tmp_path, [LAGS_MAX + 5, LAGS_MAX + 9, 0])
    assert [each.lag for each in report.by_lag] == [0, LAGS_MAX - 1]
    policy = open_policy(tmp_path / "a")
    foreign = GroupTrainer(policy, TrainerSpec("x"), 4096).train(
        [replace(each, own_tokens=False) for each in groups]
    )
    assert (foreign.by_lag, foreign.trained_tokens > 0) == ((), True)


def test_they_cross_the_pipe_and_status_shows_them(tmp_path):
    report, _ = trained(tmp_path, [0, 2], off=0.2)
    back = frames.unpack(frames.pack(replace(report, reference_kl=0.0)))
    assert back.by_lag == report.by_lag
    step = replace(STEP, by_lag=report.by_lag)
    lines = dict(done_lines(replace(snapshot(), role="learner", step=step)))
    assert lines["by age"].startswith("effective samples, by updates since: 1.00 at 0, 0.9")
    unknown = replace(STEP, by_lag=(LagFigures(0, 4, None, 0.0, 0.0),))
    for none in (unknown, STEP, None):
        shown = dict(done_lines(replace(snapshot(), role="learner", step=none)))
        assert "by age" not in shown
    assert not math.isnan(report.loss)
