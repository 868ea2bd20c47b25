"""What says that an engine's weights are quantised, and who is told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.app import ENGINE_NOTE, App
from node.engines.base import Maker
from node.engines.vllm_text import quantisation_of
from node.monitor.records import Trouble
from swarm.errors import ConfigError
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
    node = SimpleNamespace(notes={}, precision="")

    async def tell(record: Trouble) -> None:
        told.append(record)

    async def body() -> None:
        app: Any = SimpleNamespace(_node=node, _tell=tell)
        await App._note_maker(app, Maker("vllm", "bfloat16"))
        assert (told, node.notes, node.precision) == ([], {}, "bfloat16")
        for _ in range(2):
            await App._note_maker(app, Maker("vllm", "fp8"))
        assert len(told) == 1
        assert "(fp8)" in told[0].what
        assert node.notes == {ENGINE_NOTE: told[0].what}
        await App._note_maker(app, Maker("vllm", "bfloat16"))
        assert not node.notes

    run(body)
