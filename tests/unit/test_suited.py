"""What a trainer takes where nothing was named, and that it steps at that rate."""

from dataclasses import replace

import pytest
import torch

from node.config.load import load_config
from node.interfaces.trainer_spec import TrainerSpec
from node.train.default_rate import suited
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from tests.unit.training_support import group, open_policy, qwen_directory

SPEC = TrainerSpec("test", step_guard=False)


@pytest.mark.parametrize(
    ("parameters", "adapter", "rate", "warm_up"),
    [
        (1_200_000, 0, 1e-4, 0),
        (10_000_000, 0, 1e-4, 0),
        (10_000_001, 0, 1e-5, 10),
        (134_515_008, 0, 1e-5, 10),
        (134_515_008, 5_000_000, 1e-4, 10),
        (1_000_000_001, 0, 2e-6, 10),
        (7_000_000_000, 40_000_000, 1e-4, 10),
    ],
)
def test_the_rate_follows_from_what_is_trained(parameters, adapter, rate, warm_up):
    found = suited(parameters, adapter, None, None)
    assert (found.learning_rate, found.warm_up_updates) == (rate, warm_up)


def test_what_was_set_is_taken_and_told():
    assert str(suited(134_515_008, 0, None, None)) == (
        "learning rate 1e-05 (a whole model of 135 M parameters), warm-up 10 updates"
    )
    assert str(suited(134_515_008, 0, 2e-4, 0)) == (
        "learning rate 0.0002 (as set, for a whole model of 135 M parameters), warm-up 0 updates"
    )
    assert "an adapter of 4.88 M parameters" in str(suited(134_515_008, 4_884_480, None, None))


def test_the_rate_rises_in_a_line():
    found = suited(1_000_000_000, 0, None, 4)
    assert [found.warmth(updates) for updates in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert suited(1_000_000, 0, None, None).warmth(0) == 1.0


def test_the_trainer_steps_at_the_rate_of_its_warm_up(tmp_path):
    """Adam's first step moves each weight by the rate, nearly whatever the gradient is."""
    policy = open_policy(qwen_directory(tmp_path))

    def moved(**settings) -> float:
        before = policy.model.lm_head.weight.detach().clone()
        trainer = GroupTrainer(policy, replace(SPEC, **settings), 10_000)
        trainer.train([group(policy, "1+1=", ["2", "13"], [1.0, -1.0])])
        assert trainer.optimizer.param_groups[0]["lr"] == trainer.suited.learning_rate
        after = policy.model.lm_head.weight.detach().clone()
        with torch.no_grad():
            policy.model.lm_head.weight.copy_(before)
        return float((after - before).abs().max())

    assert moved() == pytest.approx(1e-4, rel=0.01)
    assert moved(learning_rate=1e-2, warm_up_updates=10) == pytest.approx(1e-3, rel=0.01)
    assert moved(learning_rate=1e-2, warm_up_updates=0) == pytest.approx(1e-2, rel=0.01)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"warm.up.updates"):
        load_config({"warm_up_updates": "-1"}, {})
    with pytest.raises(ConfigError, match=r"learning.rate"):
        load_config({"learning_rate": "0"}, {})
