"""Weights that a trainer keeps beside the present ones: in losses, checkpoints and the plan."""

import math
from dataclasses import replace

import pytest
import torch

from node.config import load_config
from node.hosting.models import trainer_spec
from node.interfaces.trainer import DamagedCheckpoint, TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy
from node.train import memory
from node.train.ranks import Ranks
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import opened
from swarm.errors import ConfigError
from tests.unit.training_support import group, open_policy, qwen_directory

SPEC = TrainerSpec(
    "test", learning_rate=0.01, grad_norm_max=1e9, step_guard=False, clips_to_median=False
)
MANY = 100_000  # tokens: one micro-batch
EWMA = replace(SPEC, loss="ppo_ewma, centre_of_mass=2, unknown_share_max=1")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return qwen_directory(tmp_path_factory.mktemp("model"))


def batch(policy: Policy) -> list[TrainingGroup]:
    return [
        group(policy, "1+1=", ["2", "13", "4"], [1.0, -1.5, 0.5]),
        group(policy, "12/16=", ["3/4", "x"], [1.0, -1.0]),
    ]


def flat(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()]).clone()


def average_of(trainer: GroupTrainer) -> torch.Tensor:
    with trainer._kept["averaged"].loaded():
        return flat(trainer.policy)


@pytest.mark.parametrize("tokens", [MANY, 8])
def test_updates_clip_around_the_average_of_all_before(directory, tokens):
    """Each update's loss is of the average's log-probs, which another model gives here."""
    policy, other = open_policy(directory), open_policy(directory)
    trainer = GroupTrainer(policy, EWMA, tokens)
    groups = batch(policy)
    average, total = flat(policy), 1.0
    for _ in range(4):
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(average.clone(), other.model.parameters())
        averaged = GroupTrainer(other, SPEC, MANY).logprobs(groups)
        now = trainer.logprobs(groups)
        whole = sum(len(row) for rows in now for row in rows)
        loss = 0.0
        for one, rows, kept in zip(groups, now, averaged, strict=True):
            for advantage, row, far in zip(one.advantages, rows, kept, strict=True):
                for a, b in zip(row, far, strict=True):
                    moved = torch.tensor(a - b).exp()
                    cut = moved.clamp(0.8, 1.2)
                    least = torch.minimum(moved * advantage, cut * advantage)
                    loss -= float(least / moved) / whole  # over what generated: the policy before
        report = trainer.train(groups)
        assert report.loss == pytest.approx(loss, abs=1e-5)
        total = 2 / 3 * total + 1
        average += (flat(policy) - average) / total
        assert torch.allclose(average_of(trainer), average, atol=1e-6)
        assert not torch.allclose(average, flat(policy), atol=1e-4)
    assert report.clip_fraction > 0.0
    plain = open_policy(directory)
    usual = GroupTrainer(plain, replace(EWMA, loss="decoupled, unknown_share_max=1"), tokens)
    for _ in range(4):
        usual.train(groups)
    assert not torch.allclose(flat(plain), flat(policy), atol=1e-3)


def test_several_updates_on_a_batch_follow_one_by_one(directory):
    policy = open_policy(directory)
    trainer = GroupTrainer(policy, replace(EWMA, updates_per_batch=3), MANY)
    trainer.train(batch(policy))
    average = average_of(trainer)
    again = open_policy(directory)
    steps = GroupTrainer(again, replace(EWMA, updates_per_batch=1), MANY)
    steps.train(batch(again))
    assert trainer.policy_version == 3
    assert not torch.allclose(average, average_of(steps), atol=1e-4)


def test_the_average_is_in_the_checkpoint(directory, tmp_path):
    policy = open_policy(directory)
    trainer = GroupTrainer(policy, EWMA, MANY)
    for _ in range(3):
        trainer.train(batch(policy))
    trainer.save(tmp_path)
    average = average_of(trainer)
    resumed = GroupTrainer(open_policy(directory), EWMA, MANY)
    resumed.resume(tmp_path)
    assert torch.equal(average_of(resumed), average)
    reports = [each.train(batch(policy)) for each in (trainer, resumed)]
    assert reports[0].loss == reports[1].loss
    assert torch.equal(average_of(trainer), average_of(resumed))
    trainer.roll_back(tmp_path)
    assert torch.equal(average_of(trainer), average)
    trainer.take_over(9)
    assert torch.equal(average_of(trainer), flat(policy))
    (tmp_path / "averaged.safetensors").write_bytes(b"no weights")
    with pytest.raises(DamagedCheckpoint, match="averaged"):
        resumed.resume(tmp_path)
    (tmp_path / "averaged.safetensors").unlink()  # of a trainer that kept none
    resumed.resume(tmp_path)
    assert torch.equal(average_of(resumed), flat(resumed.policy))


def test_kept_weights_are_in_the_plan_and_not_for_several_ranks(directory):
    spec = replace(SPEC, model=str(directory), device="cpu")
    parameters = memory.shape_of(str(directory)).parameters
    plain, kept = memory.plan(spec), memory.plan(replace(spec, loss="ppo_ewma"))
    assert kept.held_bytes - plain.held_bytes == 4 * parameters
    assert kept.estimate_bytes - plain.estimate_bytes == 4 * parameters
    ranks = Ranks(rank=0, size=2, local_rank=0, local_size=2)
    with pytest.raises(ConfigError, match="ppo_ewma: a trainer of several ranks keeps no other"):
        memory.plan(replace(spec, loss="ppo_ewma"), ranks)


# --- the divergence from a reference ----------------------------------------------------------


KL = replace(SPEC, kl_weight=0.5)


def k3(now: list[float], reference: list[float]) -> float:
    return sum(math.exp(q - p) - 1 - (q - p) for p, q in zip(now, reference, strict=True))


def exact(policy: Policy, groups, reference, weight: float) -> torch.Tensor:
    """In float64 the gradient of (sum -A log p + weight (q / p - 1 - log q / p)) / all tokens."""
    model = policy.model.double()
    total = sum(len(c.token_ids) for g in groups for c in g.completions)
    loss = torch.zeros((), dtype=torch.float64)
    for one, rows in zip(groups, reference, strict=True):
        prompt = policy.encode_prompt(one.prompt)
        for completion, advantage, row in zip(one.completions, one.advantages, rows, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            logs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            logs = logs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            far = torch.tensor(row, dtype=torch.float64) - logs
            loss += (-advantage * logs + weight * one.own_tokens * (far.exp() - 1 - far)).sum()
    (loss / total).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).float()
    model.zero_grad()
    model.float()
    return gradient


@pytest.mark.parametrize("tokens", [MANY, 8])
def test_the_divergence_of_own_tokens_is_in_the_gradient(directory, tokens):
    """After steps away from the reference, with foreign tokens that it is not of."""
    policy = open_policy(directory)
    groups = [*batch(policy), group(policy, "5+5=", ["10", "11"], [1.0, -1.0], own=False)]
    trainer = GroupTrainer(policy, replace(KL, foreign_weighting="none"), tokens)
    reference = trainer.logprobs(groups)
    first = trainer.train(groups)
    assert first.reference_kl == pytest.approx(0.0, abs=1e-9)
    trainer.train(groups)
    now = trainer.logprobs(groups)
    wanted = exact(policy, groups, reference, 0.5)
    trainer.optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    before = flat(policy)
    report = trainer.train(groups)
    assert torch.allclose(before - flat(policy), wanted, rtol=1e-3, atol=1e-5)
    own = [(n, r) for n, r in zip(now[:2], reference[:2], strict=True)]
    far = sum(k3(a, b) for n, r in own for a, b in zip(n, r, strict=True))
    count = sum(len(row) for rows in now[:2] for row in rows)
    assert report.reference_kl == pytest.approx(far / count, rel=1e-3)
    assert report.reference_kl > 1e-4


def test_tokens_that_a_mask_leaves_out_are_not_held_to_the_reference(directory):
    policy = open_policy(directory)
    trainer = GroupTrainer(policy, KL, MANY)
    trainer.train(batch(policy))
    masked = [
        replace(one, masks=tuple((False,) * len(c.token_ids) for c in one.completions))
        for one in batch(policy)
    ]
    trainer.optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    before = flat(policy)
    report = trainer.train(masked)
    assert report.reference_kl > 1e-6
    assert torch.equal(before, flat(policy))


def test_without_a_weight_no_reference_is_kept_and_no_bit_differs(directory):
    spec = replace(SPEC, updates_per_batch=2)
    found = []
    for settings in (spec, replace(spec, kl_reset_every=3), replace(spec, kl_weight=0.5)):
        policy = open_policy(directory)
        trainer = GroupTrainer(policy, settings, MANY)
        trainer.train(batch(policy))
        found.append((flat(policy), len(trainer._kept)))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])
    assert [kept for _, kept in found] == [0, 0, 1]


def test_the_reference_is_reset_and_saved(directory, tmp_path):
    policy = open_policy(directory)
    trainer = GroupTrainer(policy, replace(KL, kl_reset_every=2), MANY)

    def reference() -> torch.Tensor:
        with trainer._kept["reference"].loaded():
            return flat(policy)

    start = flat(policy)
    trainer.train(batch(policy))
    assert torch.equal(reference(), start)
    trainer.train(batch(policy))
    assert torch.equal(reference(), flat(policy))
    reset = flat(policy)
    trainer.train(batch(policy))
    assert torch.equal(reference(), reset)
    trainer.save(tmp_path)
    resumed = GroupTrainer(open_policy(directory), KL, MANY)
    resumed.resume(tmp_path)
    with resumed._kept["reference"].loaded():
        assert torch.equal(flat(resumed.policy), reset)
    assert replace(KL, loss="ppo_ewma").kept_copies == 2


def test_a_nodes_settings_reach_the_trainer():
    config = load_config({"kl_weight": "0.01", "kl_reset_every": "100"}, {})
    spec = trainer_spec(config, "m")
    assert (spec.kl_weight, spec.kl_reset_every) == (0.01, 100)
    assert TrainerSpec.from_record(spec.to_record()) == spec


# --- snapshots of versions -------------------------------------------------------------------


def made_by(groups, *spans) -> list[TrainingGroup]:
    """The groups, as if these versions had made each completion's tokens, which an engine finds
    unlikely. A completion has as many tokens of the last version as are left."""
    found = []
    for one in groups:
        made = []
        for c in one.completions:
            rest = len(c.token_ids) - sum(count for _, count in spans[:-1])
            whole = (*spans[:-1], (spans[-1], rest))
            logprobs = (-9.0,) * len(c.token_ids)
            told = () if len(whole) == 1 else whole
            made.append(replace(c, logprobs=logprobs, policy_version=whole[0][0], spans=told))
        found.append(replace(one, completions=tuple(made)))
    return found


@pytest.mark.parametrize("tokens", [MANY, 8])
def test_tokens_are_scored_by_the_version_that_made_them(directory, tokens):
    """As if the engine had said what those versions think; of a version that is gone it did."""
    policy, other = open_policy(directory), open_policy(directory)
    spec = replace(SPEC, loss="cispo, snapshots=2")
    trainer = GroupTrainer(policy, spec, tokens)
    groups = batch(policy)
    thought = {}
    for version in range(3):
        thought[version] = trainer.logprobs(groups)
        if version < 2:
            trainer.train(made_by(groups, version))
    torch.nn.utils.vector_to_parameters(flat(policy), other.model.parameters())
    usual = GroupTrainer(other, replace(SPEC, loss="cispo"), tokens)
    told = [
        replace(
            one,
            completions=tuple(
                replace(c, logprobs=(thought[1][g][k][0], *thought[2][g][k][1:]))
                for k, c in enumerate(one.completions)
            ),
        )
        for g, one in enumerate(groups)
    ]
    wanted = usual.train(told)
    report = trainer.train(made_by(groups, (1, 1), 2))
    assert sorted(trainer._snapshots) == [1, 2]
    assert report.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert report.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    claimed = GroupTrainer(open_policy(directory), replace(SPEC, loss="cispo"), tokens)
    assert abs(claimed.train(made_by(groups, 0)).loss - report.loss) > 1e-2


def test_tokens_of_a_version_that_is_gone_keep_what_the_engine_said(directory):
    losses, groups = [], batch(open_policy(directory))
    for settings, version in (("", 7), (", snapshots=1", 7), (", snapshots=1", 0)):
        trainer = GroupTrainer(open_policy(directory), replace(SPEC, loss="cispo" + settings), MANY)
        losses.append(trainer.train(made_by(groups, version)).loss)
    assert losses[0] == losses[1]
    assert abs(losses[0] - losses[2]) > 1e-2


def test_rows_that_an_engine_gave_no_log_probs_for_are_known_by_their_versions(directory):
    policy = open_policy(directory)
    spec = replace(SPEC, loss="grpo, snapshots=1")
    bare = [
        replace(one, completions=tuple(replace(c, logprobs=()) for c in one.completions))
        for one in made_by(batch(policy), 0)
    ]
    assert GroupTrainer(policy, spec, MANY).train(bare).unknown_tokens == 0
    gone = [
        replace(one, completions=tuple(replace(c, policy_version=5) for c in one.completions))
        for one in bare
    ]
    report = GroupTrainer(policy, spec, MANY).train(gone)
    assert (report.trained_tokens, report.left_out_groups) == (0, 2)
    assert replace(spec, kl_weight=0.1).kept_copies == 2


def test_of_an_adapter_the_adapter_alone_is_kept(directory, tmp_path):
    """Its reference at the start is the model without it."""
    spec = replace(KL, model=str(directory), lora_rank=2, device="cpu", lora_base="float32")
    policy = opened(spec, "cpu")
    trainer = GroupTrainer(policy, spec, MANY)
    groups = batch(policy)
    bare = GroupTrainer(open_policy(directory), SPEC, MANY).logprobs(groups)
    assert trainer.train(groups).reference_kl == pytest.approx(0.0, abs=1e-9)
    assert trainer.train(groups).reference_kl > 0.0
    with trainer._kept["reference"].loaded():
        for rows, wanted in zip(trainer.logprobs(groups), bare, strict=True):
            for row, values in zip(rows, wanted, strict=True):
                assert row == pytest.approx(values, abs=1e-5)
    trainer.save(tmp_path)
    shape = memory.shape_of(str(directory), spec.adapter)
    kept = memory.plan(spec).held_bytes - memory.plan(replace(spec, kl_weight=0.0)).held_bytes
    assert kept == 4 * shape.adapter_parameters < 4 * shape.parameters / 2
