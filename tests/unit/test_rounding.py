"""From fp32 to bf16, and what rounding hides of what was learned."""

import math
from dataclasses import replace

import pytest
import torch

from node.interfaces.trainer_spec import TrainerSpec
from node.policies.rounding import to_bfloat16
from node.train import trainer as trainer_module
from node.train import version_lag
from node.train.trainer import GroupTrainer
from tests.unit.training_support import gpt2_directory, group, open_policy, qwen_directory

SIZES = [0, 1, 7, 2**18 - 1, 2**20 + 3]
STEP = 1e-6  # of a weight, in an update


def on_the_grid(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(count, generator=generator)).bfloat16().float()


@pytest.mark.parametrize("count", SIZES)
def test_numbers_of_bf16_stay_as_they_are(count):
    value = on_the_grid(count)
    assert torch.equal(to_bfloat16(value).float(), value)


def test_a_number_becomes_one_of_its_two_neighbours():
    value = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    below = (value.view(torch.int32) & -65_536).view(torch.float32)  # toward zero
    above = ((value.view(torch.int32) & -65_536) + 65_536).view(torch.float32)
    rounded = to_bfloat16(value).float()
    assert bool(((rounded == below) | (rounded == above)).all())
    assert 0.45 < float((rounded == above).float().mean()) < 0.55


@pytest.mark.parametrize("shape", [(1000, 1024), (1024, 1000), (999, 1001)])
def test_sums_by_row_and_by_column_move_as_in_fp32(shape):
    """A step far below a bf16 number's distance to the next one arrives in every sum."""
    before = on_the_grid(math.prod(shape)).view(shape)
    after = before + STEP * before.sign()
    moved = (to_bfloat16(after).float() - before).abs()
    for dim in (0, 1):
        share = moved.sum(dim) / (STEP * shape[dim])
        assert float((share - 1).abs().mean()) < 0.35, dim
    assert abs(float(moved.sum()) / (STEP * before.numel()) - 1) < 0.02
    nearest = (after.bfloat16().float() - before).abs()
    assert float(nearest.sum()) / (STEP * before.numel()) < 0.1  # what it is for


def test_what_did_not_move_keeps_its_bits_and_what_moved_back_is_back():
    first = 0.02 * torch.randn(50_000, generator=torch.Generator().manual_seed(2))
    second = first.clone()
    second[::50] += 1e-3
    changed = to_bfloat16(first) != to_bfloat16(second)
    assert set(changed.nonzero().flatten().tolist()) <= set(range(0, 50_000, 50))
    assert int(changed.sum()) > 900
    second[::50] = first[::50]
    assert torch.equal(to_bfloat16(first), to_bfloat16(second))


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, 3.3e38, 1e-40])
def test_unusual_numbers_stay_of_their_kind(value):
    found = to_bfloat16(torch.full((9,), value)).float()
    assert torch.equal(found.isinf(), torch.full((9,), math.isinf(value)))
    assert torch.equal(found.sign(), torch.full((9,), value).sign())


def test_what_is_not_a_number_stays_none():
    assert bool(to_bfloat16(torch.full((9,), math.nan)).isnan().all())


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_are_rounded_to_the_nearest(kind):
    value = on_the_grid(100).to(kind)
    assert torch.equal(to_bfloat16(value), value.bfloat16())


def test_a_transposed_tensor_is_rounded_in_its_own_order():
    value = torch.randn(30, 40, generator=torch.Generator().manual_seed(3)).T
    assert torch.equal(to_bfloat16(value), to_bfloat16(value.contiguous()))


# the figure


def lagging(directory, generates_in="bfloat16", rate=1e-6):
    policy = open_policy(directory)
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    policy.model.save_pretrained(directory)
    spec = TrainerSpec(
        str(directory), learning_rate=rate, warm_up_updates=0, generates_in=generates_in
    )
    return GroupTrainer(policy, replace(spec, step_guard=False), 4096)


def after(trainer, updates: int) -> float:
    reports = [
        trainer.train([group(trainer.policy, "1+1=", ["2", "3"], [1.0, -1.0])])
        for _ in range(updates)
    ]
    return reports[-1].version_lag


@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory])  # gpt2 ties its head
def test_the_lag_is_small_and_to_the_nearest_it_would_be_nearly_all(tmp_path, make, monkeypatch):
    trainer = lagging(make(tmp_path / "a"))
    kept = [each.clone() for each in trainer.policy.model.parameters()]
    assert math.isnan(after(trainer, version_lag.FIRST_UPDATE - 1))
    found = after(trainer, 1)
    monkeypatch.setattr(version_lag, "to_bfloat16", lambda value: value.bfloat16())
    monkeypatch.setattr(version_lag, "TIMES_MIN", 0.0)
    nearest = after(trainer, 1)
    assert 0.0 < found < 0.5 * nearest
    assert nearest > 0.6
    moved = zip(trainer.policy.model.parameters(), kept, strict=True)
    assert not any(torch.equal(now, before) for now, before in moved)  # they are the masters again


def test_it_is_measured_at_times_and_told_in_between(tmp_path, monkeypatch):
    trainer = lagging(qwen_directory(tmp_path / "a"))
    loads = []
    real = version_lag.tensor_files.load
    monkeypatch.setattr(
        version_lag.tensor_files, "load", lambda *given: loads.append(given) or real(*given)
    )
    monkeypatch.setattr(version_lag, "TIMES_MIN", math.inf)
    found = [after(trainer, 1) for _ in range(8)]
    assert len(loads) == 1
    assert len(set(found[version_lag.FIRST_UPDATE - 1 :])) == 1


def test_it_is_measured_only_where_another_copy_generates_in_bf16(tmp_path):
    trainer = lagging(qwen_directory(tmp_path / "a"), "float32")
    assert math.isnan(after(trainer, version_lag.FIRST_UPDATE))
    assert trainer_module.VersionLag is version_lag.VersionLag


def test_measuring_does_not_change_what_is_learned(tmp_path):
    one, other = (
        lagging(qwen_directory(tmp_path / name), kind, rate=1e-4)
        for name, kind in (("a", "bfloat16"), ("b", "float32"))
    )
    for each in (one, other):
        after(each, version_lag.FIRST_UPDATE + 2)
    pairs = zip(one.policy.model.parameters(), other.policy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
