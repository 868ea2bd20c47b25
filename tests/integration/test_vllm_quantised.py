"""Engines that sample with weights which vLLM quantises as they go in.

What they say is compared with what exact weights say, and, after loads in place, with what a server
says that was started on the same directory.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.engines.vllm import server
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.worker import ReloadExtension
from node.interfaces.engine import Sampling
from node.interfaces.quantisation import Quantisation
from node.observe.records import Trouble
from swarm.errors import ChildFailed
from swarm.rollouts import is_quantised
from tests.integration.nodes import MakeNode
from tests.integration.test_vllm_updates import reference
from tests.integration.vllm_models import model_directory, open_model
from tests.support import run

PROMPTS = ("3+4=", "what day is it?")
SAMPLING = Sampling(max_new_tokens=24)
TIMEOUT_S = 600.0  # a busy machine is no failure
KEEPS_KERNEL, KEEPS_ALL = "keeps-kernel", "keeps-all"  # files among weights: `StaleExtension`
SMALL = 1e-3  # a step that is far below what quantised weights round
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.integration]


class StaleExtension(ReloadExtension):
    """Loads as the real one does; where a file in the directory says so, one layer or all of them
    go on with the weights that they had."""

    def reload_directory(
        self: Any, directory: str, names: Sequence[str] | None = None, lent: bool = False
    ) -> dict[str, str]:
        if (Path(directory) / KEEPS_ALL).exists():
            return {}
        layer = self.model_runner.get_model().model.layers[0].mlp.gate_up_proj
        kernel = layer.scheme.kernel
        before = getattr(kernel, "dnnl_handler", None)
        answer = super().reload_directory(directory, names, lent)
        if (Path(directory) / KEEPS_KERNEL).exists():
            assert before is not None
            kernel.dnnl_handler = before
        return answer


def changed(source: Path, target: Path, *, layer: int | None = None, share: float = 0.3) -> Path:
    """Other weights: all of them, or those of a layer."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if layer is None or f"layers.{layer}." in name:
            noise = torch.randn(tensor.shape, generator=generator)
            weights[name] = tensor + share * tensor.std().clamp_min(0.1) * noise
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


async def sampled(engine: VllmEngine) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    groups = await engine.generate(PROMPTS, 4, SAMPLING, 3)
    return [(each.token_ids, each.logprobs) for group in groups for each in group]


@pytest.mark.parametrize("kind", [pytest.param("fp8", marks=pytest.mark.long), "int8"])
def test_each_load_is_quantised_anew(
    kind: Quantisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights, some, and all again; then a layer that goes on with old ones is found out, and
    so are all where the step is so small that the difference from the trainer would not tell."""
    first = model_directory(tmp_path / "first", 1, stops=False, context_tokens=256)
    second = changed(first, tmp_path / "second")
    third = changed(second, tmp_path / "third", layer=1)
    options: dict[str, Any] = {"threads": 1, "reference": reference, "quantization": kind}
    if kind == "int8":
        worker = f"{__name__}.{StaleExtension.__name__}"
        monkeypatch.setattr(server, "WORKER_EXTENSION", worker)

    async def live() -> list[Any]:
        async with open_model(first, tmp_path / "data", **options) as engine:
            assert (engine.maker.engine, engine.maker.precision) == ("vllm", kind)
            assert is_quantised(engine.maker.precision)
            before = await sampled(engine)
            await engine.load(second, 1)
            await engine.load(third, 2)
            update = engine.last_update
            assert update is not None
            assert 0 < update.tensors < update.tensors_total
            assert update.probe is not None
            assert update.probe.mean > 1e-3  # rounding is there, and seen
            after = await sampled(engine)
            assert after != before
            await engine.load(first, 3)
            assert await sampled(engine) == before
            if kind == "int8":
                stale = Path(shutil.copytree(third, tmp_path / "stale"))
                (stale / KEEPS_KERNEL).touch()
                with pytest.raises(ChildFailed, match="log-probs differ from the trainer's by"):
                    await engine.load(stale, 4)
                small = changed(first, tmp_path / "small", share=SMALL)
                (small / KEEPS_ALL).touch()
                with pytest.raises(ChildFailed, match="still samples with the weights before"):
                    await engine.load(small, 5)
                assert await sampled(engine) == before
                (small / KEEPS_ALL).unlink()
                await engine.load(small, 6)
            assert (engine.restarts, engine.rolled_back) == (0, 2 * (kind == "int8"))
        return after

    async def fresh() -> list[Any]:
        async with open_model(third, tmp_path / "fresh", **options) as engine:
            return await sampled(engine)

    after = run(live, timeout_s=TIMEOUT_S)
    assert run(fresh, timeout_s=TIMEOUT_S) == after


def test_a_node_says_that_its_engine_is_quantised_and_how_far_it_is_off(
    make_node: MakeNode,
) -> None:
    node = make_node(
        "a",
        *("--engine", "vllm", "--engine-quantization", "int8"),
        *("--external", "0", "--evaluate-every", "0"),
    ).start()
    node.until(lambda: [each for each in node.rounds() if each.informative_groups])
    node.until(lambda: node.last_round() >= 3)
    for record in node.rounds():
        if record.informative_groups:
            assert record.groups_quantised > 0
            assert record.mismatch_mean is not None
            assert 1e-4 < record.mismatch_mean < 0.5
            assert record.effective_share is not None
            assert 0.5 < record.effective_share < 1.0
    status = node.status()
    assert status is not None
    assert any("(int8)" in note for note in status.notes)
    assert any("(int8)" in each.what for each in node.events(Trouble))
    assert node.interrupt() == 0
