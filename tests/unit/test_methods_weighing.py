"""Corrections: weights against their definitions, and in the trainer."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.methods.choices import chosen_correction
from node.methods.importance_weights import importance_weights
from node.methods.loss_settings import CORRECTIONS
from node.train.trainer import GroupTrainer
from tests.unit.test_training_objectives import MANY, SPEC, batch, outcome, stale
from tests.unit.training_support import open_policy, qwen_directory

RHO = [0.3, 1.0, 2.5, 6.0]


def weights(name: str, rho: Sequence[float], advantage: float = 1.0) -> list[float]:
    set_to = chosen_correction(name)
    logs = torch.tensor([math.log(each) for each in rho], dtype=torch.float64)
    zeros = torch.zeros_like(logs)
    found = importance_weights(logs, zeros, zeros + advantage, set_to)
    return [round(float(each), 9) for each in found]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("truncated", [0.3, 1.0, 2.0, 2.0]),
        ("truncated, weight_max=1", [0.3, 1.0, 1.0, 1.0]),
        ("icepop", [0.0, 1.0, 2.5, 0.0]),
        ("masked", [0.0, 1.0, 0.0, 0.0]),
        ("veto", [1.0] * 4),
        ("veto, weight_min=0.5", [0.0] * 4),
        ("geometric", [0.0] * 4),  # 1.46
        ("geometric, weight_max=2", [1.0] * 4),
        ("k3", [0.0] * 4),
        ("k3, divergence_max=1.1", [1.0] * 4),  # (0.504 + 0 + 0.584 + 3.208) / 4 = 1.074
        ("k3, divergence_max=1.07", [0.0] * 4),
        ("opsm", [1.0] * 4),  # of a right one
    ],
)
def test_weights_of_four_tokens(name: str, wanted: list[float]) -> None:
    assert weights(name, RHO) == wanted


def test_opsm_leaves_out_what_was_wrong_and_is_left_behind() -> None:
    assert weights("opsm", [0.9, 0.9], -1.0) == [0.0, 0.0]
    assert weights("opsm", [0.9, 0.9], 1.0) == [1.0, 1.0]
    assert weights("opsm", [1.1, 1.1], -1.0) == [1.0, 1.0]
    assert weights("opsm, moved_max=0.2", [0.9, 0.9], -1.0) == [1.0, 1.0]


@pytest.mark.parametrize("name", CORRECTIONS)
@given(logs=st.lists(st.floats(-1e9, 1e9), max_size=6), advantage=st.sampled_from([-1.0, 1.0]))
def test_no_claim_makes_a_weight_that_is_no_number(
    name: str, logs: list[float], advantage: float
) -> None:
    """And where nothing moved, every token counts in full."""
    proximal = torch.tensor(logs, dtype=torch.float64)
    set_to = chosen_correction(name)
    ones = torch.full_like(proximal, advantage)
    found = importance_weights(proximal, torch.zeros_like(proximal), ones, set_to)
    assert found.shape == proximal.shape
    assert torch.isfinite(found).all()
    assert (found >= 0).all()
    assert float(found.max()) <= 5.0 if logs else True
    same = importance_weights(proximal, proximal, ones, set_to)
    assert same.tolist() == [1.0] * len(logs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return qwen_directory(tmp_path_factory.mktemp("model"))


def test_a_trainer_weighs_own_tokens_and_foreign_by_it(directory) -> None:  # type: ignore[no-untyped-def]
    policy = open_policy(directory)
    own = stale(policy, batch(policy), 0.6)
    plain, before = outcome(directory, own)
    for name in ("truncated", "icepop, weight_min=0.8, weight_max=1.2", "masked, weight_min=0.8"):
        report, after = outcome(directory, own, correction=name)
        assert not torch.equal(after, before), name
        assert (report.mask_fraction > 0) is not name.startswith("truncated")
    # own tokens whose log-probs are this policy's: nothing is weighed
    fresh = stale(policy, batch(policy), 0.0)
    assert torch.allclose(
        outcome(directory, fresh, correction="truncated")[1],
        outcome(directory, fresh)[1],
        atol=1e-5,
    )
    assert plain.mask_fraction == 0.0


def test_without_log_probs_a_token_counts_as_before(directory) -> None:  # type: ignore[no-untyped-def]
    policy = open_policy(directory)
    unknown = [
        replace(g, completions=tuple(replace(c, logprobs=()) for c in g.completions))
        for g in batch(policy)
    ]
    _, before = outcome(directory, unknown)
    assert torch.equal(outcome(directory, unknown, correction="veto")[1], before)


def test_a_completion_is_left_out_as_a_whole(directory) -> None:  # type: ignore[no-untyped-def]
    policy = open_policy(directory)
    found = GroupTrainer(policy, SPEC, MANY).logprobs(batch(policy))
    groups = []
    for at, (each, rows) in enumerate(zip(batch(policy), found, strict=True)):
        shift = 2.0 if at == 0 else 0.0  # the first group has become unlikely
        completions = tuple(
            replace(c, logprobs=tuple(min(v + shift, -1e-4) for v in values))
            for c, values in zip(each.completions, rows, strict=True)
        )
        groups.append(replace(each, completions=completions))
    report, _ = outcome(directory, groups, correction="geometric, weight_min=0.9, weight_max=1.1")
    first = sum(len(c.token_ids) for c in groups[0].completions)
    assert report.mask_fraction == pytest.approx(first / report.trained_tokens)
