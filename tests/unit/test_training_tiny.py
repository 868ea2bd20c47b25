import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from node.policies.presets import TinyRecipe, recipe_key
from node.policies.tiny import make_tiny
from swarm.errors import ConfigError
from tests.unit.training_support import SMALL, open_policy


def pairs():
    for number in itertools.count():
        yield f"say {number % 7}: ", str(number % 7)


def silent(share: float, line: str) -> None:
    assert 0.0 <= share <= 1.0
    assert "\n" not in line


def test_the_same_arguments_make_the_same_bits(tmp_path):
    torch.manual_seed(1)
    make_tiny(pairs(), tmp_path / "a", silent, SMALL)
    torch.manual_seed(2)  # the global generator must not matter
    make_tiny(pairs(), tmp_path / "b", silent, SMALL)
    one = load_file(tmp_path / "a" / "model.safetensors")
    other = load_file(tmp_path / "b" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_seed_makes_other_weights(tmp_path):
    make_tiny(pairs(), tmp_path / "a", silent, SMALL)
    make_tiny(pairs(), tmp_path / "b", silent, replace(SMALL, seed=1))
    one = load_file(tmp_path / "a" / "model.safetensors")
    other = load_file(tmp_path / "b" / "model.safetensors")
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_warming_up_learns_and_stops_at_its_target(tmp_path):
    shares = []
    recipe = replace(SMALL, steps=400, target=0.6, learning_rate=1e-2)
    right = make_tiny(pairs(), tmp_path, lambda share, _: shares.append(share), recipe)
    assert right >= 0.6
    assert shares[-1] == 1.0
    assert len(shares) < 400
    assert open_policy(tmp_path).parameters < 100_000


def test_running_out_of_pairs_and_long_prompts_are_told(tmp_path):
    with pytest.raises(ConfigError, match="ran out"):
        make_tiny(itertools.islice(pairs(), 3), tmp_path, silent, SMALL)
    with pytest.raises(ConfigError, match="does not fit"):
        make_tiny(itertools.repeat(("x" * 500, "y")), tmp_path, silent, SMALL)


def test_the_cache_key_follows_recipe_and_source():
    keys = {
        recipe_key(TinyRecipe(), "a"),
        recipe_key(TinyRecipe(), "b"),
        recipe_key(TinyRecipe(seed=1), "a"),
    }
    assert len(keys) == 3
    assert recipe_key(TinyRecipe(), "a") in keys
