"""What says that an engine's weights are quantised, and who is told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.config import load_config
from node.engines.vllm.probe import BF16, FP32, QUANTISED, tolerance_of
from node.engines.vllm.text import ModelText, quantisation_of
from node.interfaces.engine import EngineInfo
from node.interfaces.quantisation import in_int8
from node.observe.records import Trouble
from node.run.node import ENGINE_NOTE, Node, Notes
from swarm.errors import ConfigError
from tests.integration.vllm_models import model_directory
from tests.support import run


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, ""),
        ({"quantization_config": None}, ""),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "FP8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "a\nb"}}, "quantised"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_a_models_own_files_say_how_its_weights_are_quantised(
    config: dict[str, Any], found: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert quantisation_of(tmp_path) == found


def test_some_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        quantisation_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert quantisation_of(tmp_path) == "modelopt"


def test_the_log_is_told_once_and_status_as_long_as_it_is_so() -> None:
    told: list[Trouble] = []
    node: Any = SimpleNamespace(notes=Notes(), precision="")

    async def tell(record: Trouble) -> None:
        told.append(record)

    async def body() -> None:
        await Node.note_maker(node, EngineInfo("vllm", "bfloat16"), tell)
        assert (told, node.notes, node.precision) == ([], {}, "bfloat16")
        for _ in range(2):
            await Node.note_maker(node, EngineInfo("vllm", "fp8"), tell)
        assert len(told) == 1
        assert "(fp8)" in told[0].what
        assert node.notes == {ENGINE_NOTE: told[0].what}
        await Node.note_maker(node, EngineInfo("vllm", "bfloat16"), tell)
        assert not node.notes

    run(body)


def test_a_layers_weights_become_whole_numbers_and_a_scale_for_each_output() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(6, 40, generator=generator, dtype=torch.bfloat16)
    exact[2] = 0
    tensors = {
        "model.layers.0.q_proj.weight": exact,
        "model.layers.0.q_proj.bias": exact[:, 0],
        "model.layers.0.q_norm.weight": exact[0],
        "model.layers.1.q_proj.weight": torch.ones(2, 2, dtype=torch.int8),
    }
    made = dict(in_int8(iter(tensors.items()), {"q_proj"}))
    whole, scale = (
        made.pop("model.layers.0.q_proj.weight"),
        made.pop("model.layers.0.q_proj.weight_scale"),
    )
    assert (whole.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (6, 1))
    assert int(whole.abs().max()) == 127
    assert torch.all((whole * scale - exact.float()).abs() <= scale / 2 * 1.001)
    assert all(made[name] is tensors[name] for name in made)
    assert len(made) == 3


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("float32", FP32),
        ("bfloat16", BF16),
        ("awq", BF16),
        ("fp8", QUANTISED["fp8"]),
        ("int8", QUANTISED["int8"]),
    ],
)
def test_rounding_is_as_coarse_as_the_engine(precision: str, expected: object) -> None:
    assert tolerance_of(precision) == expected


def test_what_vllm_cannot_quantise_is_refused_in_one_line(tmp_path: Path) -> None:
    dense = ModelText(model_directory(tmp_path / "dense", 1))
    experts = ModelText(model_directory(tmp_path / "experts", 1, moe=True))
    for kind in ("none", "fp8", "int8"):
        dense.check_quantisation(kind, cpu=True)
    experts.check_quantisation("none", cpu=True)
    experts.check_quantisation("fp8", cpu=False)
    for kind, cpu in (("fp8", True), ("int8", True), ("int8", False)):
        with pytest.raises(ConfigError, match=f"--engine-quantization {kind}: .*experts.*; use"):
            experts.check_quantisation(kind, cpu=cpu)
    dense.quantised = "awq"
    dense.check_quantisation("none", cpu=True)
    with pytest.raises(ConfigError, match=r"quantised already \(awq\)"):
        dense.check_quantisation("int8", cpu=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"engine_quantization": "int8"}, "--engine-quantization int8: needs the engine vllm"),
        ({"engine_quantization": "int5"}, "--engine-quantization"),
    ],
)
def test_a_setting_that_nothing_would_heed_is_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, {})
    assert said in str(caught.value)
