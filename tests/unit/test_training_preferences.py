"""Updates on preferred completions, between those by the advantages."""

import math
from dataclasses import replace

import pytest
import torch

from node.config import load_config
from node.hosting.models import trainer_spec
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy
from node.train import memory
from node.train.ranks import Ranks
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from tests.unit.training_support import group, open_policy, qwen_directory

SPEC = TrainerSpec(
    "test", learning_rate=1.0, grad_norm_max=1e9, step_guard=False, clips_to_median=False,
    foreign_weighting="none",
)  # fmt: skip
MANY = 100_000  # tokens: one micro-batch


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return qwen_directory(tmp_path_factory.mktemp("model"))


def batch(policy: Policy) -> list[TrainingGroup]:
    """The pairs are of the second and first, and of the first and last completion."""
    return [
        group(policy, "1+1=", ["44", "2", "131", "13"], [-1.0, 1.0, -1.0, 1.0]),
        group(policy, "12/16=", ["3/4", "y", "x"], [1.0, 0.0, -1.0]),
        group(policy, "5+5=", ["10", "11"], [1.0, -1.0], own=False),
    ]


PAIRS = ((0, 1, 0), (1, 0, 2))  # group, better, worse


def descent(policy: Policy, spec: TrainerSpec, tokens: int = MANY) -> GroupTrainer:
    trainer = GroupTrainer(policy, spec, tokens)
    trainer.optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
    return trainer


def flat(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()]).clone()


def exact(policy: Policy, groups, beta: float, reference) -> tuple[float, torch.Tensor]:
    """Loss and gradient by the definition in float64; without a reference, of the policy itself."""
    model = policy.model.double()
    losses = []
    for place, *two in PAIRS:
        one, sums = groups[place], []
        prompt = policy.encode_prompt(one.prompt)
        for at in two:
            ids = one.completions[at].token_ids
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            now = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum()
            sums.append(now - (now.detach() if reference is None else sum(reference[place][at])))
        losses.append(torch.log1p(torch.exp(-beta * (sums[0] - sums[1]))))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).float()
    model.zero_grad()
    model.float()
    return float(loss.detach()), gradient


@pytest.mark.parametrize("tokens", [MANY, 8])
@pytest.mark.parametrize("kl_weight", [0.0, 0.2])
def test_the_update_on_pairs_is_the_one_of_the_definition(directory, tokens, kl_weight):
    """After two batches; the reference is the policy right before, or that of the divergence."""
    policy, plain = open_policy(directory), open_policy(directory)
    spec = replace(SPEC, kl_weight=kl_weight)
    trainer = descent(policy, replace(spec, preference="dpo, beta=0.3, every=2"), tokens)
    alone = descent(plain, spec, tokens)
    groups = batch(policy)
    reference = trainer.logprobs(groups) if kl_weight else None
    first = trainer.train(groups)
    alone.train(groups)
    assert (first.preference_pairs, first.policy_version) == (0, 1)
    assert math.isnan(first.preference_loss)
    assert torch.equal(flat(policy), flat(plain))
    report = trainer.train(groups)
    assert alone.train(groups).preference_pairs == 0
    before = flat(plain)
    loss, gradient = exact(plain, groups, 0.3, reference)
    assert (report.preference_pairs, report.policy_version) == (2, 3)
    assert report.preference_loss == pytest.approx(loss, abs=1e-5)
    assert (abs(loss - math.log(2)) > 1e-4) is (kl_weight > 0)
    assert torch.allclose(before - flat(policy), 0.1 * gradient, rtol=1e-3, atol=1e-6)
    assert gradient.norm() > 0.1


def test_without_a_preference_no_bit_differs_and_with_one_it_does(directory):
    found = []
    for preference in ("", "dpo, every=3", "dpo, every=1"):
        policy = open_policy(directory)
        descent(policy, replace(SPEC, preference=preference)).train(batch(policy))
        found.append(flat(policy))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-4)


def test_a_batch_without_pairs_has_no_such_update(directory):
    policy = open_policy(directory)
    trainer = descent(policy, replace(SPEC, preference="dpo, every=1"))
    report = trainer.train(batch(policy)[2:])  # foreign alone
    assert (report.preference_pairs, report.policy_version) == (0, 1)
    nothing = trainer.train([])
    assert (nothing.preference_pairs, nothing.policy_version) == (0, 1)


def test_batches_are_counted_over_a_resume(directory, tmp_path):
    spec = replace(SPEC, preference="dpo, every=3", learning_rate=1e-3)
    policy = open_policy(directory)
    trainer = GroupTrainer(policy, spec, MANY)
    for _ in range(2):
        assert trainer.train(batch(policy)).preference_pairs == 0
    trainer.save(tmp_path)
    resumed = GroupTrainer(open_policy(directory), spec, MANY)
    resumed.resume(tmp_path)
    assert resumed.train(batch(policy)).preference_pairs == 2


def test_the_setting_reaches_the_trainer_and_is_checked(directory):
    spec = trainer_spec(load_config({"preference": "dpo, every=2"}, {}), str(directory))
    assert spec.preference == "dpo, every=2"
    with pytest.raises(ConfigError, match="trainer preference = 'ipo': no such method"):
        TrainerSpec("m", preference="ipo")
    with pytest.raises(ConfigError, match="dpo, every=2: not for a trainer of several ranks"):
        memory.plan(replace(spec, device="cpu"), Ranks(0, 2, 0, 2))
