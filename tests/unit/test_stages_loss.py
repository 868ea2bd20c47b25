"""Losses, corrections, advantages and pairs in a round: each changes what the policy learns.

The node generates with a real policy, shares with a peer, and makes four updates on each batch.
What it learned by a method differs from what it learned by the default, and no more so once the
method is replaced by the default."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.interfaces.trainer import TrainingGroup, TrainReport
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import choices
from node.methods.advantages import Grpo, grpo
from node.methods.choices import ADVANTAGES, KNOWN
from node.methods.loss_settings import CORRECTIONS, LOSSES, SapoLoss
from node.train import trainer
from node.train.process import InProcessTrainer
from swarm.rollouts import Completion
from tests.unit.test_sapo import (
    CONFIG,
    PEER,
    Others,
    PacedTrainer,
    change,
    live,
    model,  # noqa: F401 - a fixture
    rounds,
    weights,
)

pytestmark = pytest.mark.slow
SHIFT = 0.3  # nats by which the engine that generated was surer than the trainer
STRICT = {
    "truncated": "truncated, weight_max=0.5",
    "masked": "masked, weight_min=0.9",
    "veto": "veto, weight_min=0.9",
}  # settings under which such a shift suffices


class Trainer(PacedTrainer):
    """With a loss of its own, and four updates on each batch."""

    def __init__(self, directory: Path, **spec: Any) -> None:
        super().__init__(directory)
        base = TrainerSpec(str(directory), device="cpu", threads=1, learning_rate=3e-3)
        made = replace(base, step_guard=False, updates_per_batch=4, **spec)
        InProcessTrainer.__init__(self, made)

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        return await super().train([replace(g, completions=shifted(g)) for g in groups])


def shifted(group: TrainingGroup) -> tuple[Completion, ...]:
    return tuple(
        replace(each, logprobs=tuple(min(0.0, value + SHIFT) for value in each.logprobs))
        for each in group.completions
    )


def learned(directory: Path, out: Path, spec: Mapping[str, Any], **settings: Any) -> bytes:
    """The weights after three rounds."""
    learner = Trainer(directory, **spec)
    node = live(change(CONFIG, external_groups=2, **settings), learner, Others([PEER, PEER]))
    assert sum(each.external_groups for each in rounds(node)) > 0
    return weights(learner, out)


@pytest.fixture(scope="module")
def usual(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:  # noqa: F811
    return learned(model, tmp_path_factory.mktemp("usual") / "weights", {})


@pytest.mark.parametrize("kind", sorted(set(LOSSES) - {SapoLoss.kind}))
def test_a_loss_acts(
    kind: str,
    model: Path,  # noqa: F811
    usual: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert learned(model, tmp_path / "acts", {"loss": kind}) != usual
    monkeypatch.setitem(KNOWN["loss"], kind, SapoLoss)  # type: ignore[arg-type]
    assert learned(model, tmp_path / "planted", {"loss": kind}) == usual


@pytest.mark.parametrize("kind", sorted(CORRECTIONS))
def test_a_correction_acts(
    kind: str,
    model: Path,  # noqa: F811
    usual: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = {"correction": STRICT.get(kind, kind)}
    assert learned(model, tmp_path / "acts", spec) != usual
    monkeypatch.setattr(trainer, "chosen_correction", lambda _: None)
    assert learned(model, tmp_path / "planted", spec) == usual


@pytest.mark.parametrize("kind", ["contexts", "uniqueness"])  # others: test_stages_advantage.py
def test_an_advantage_acts(
    kind: str,
    model: Path,  # noqa: F811
    usual: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters, _ = ADVANTAGES[kind]
    settings = {"advantage": parameters()}
    assert learned(model, tmp_path / "acts", {}, **settings) != usual
    by_default = (parameters, lambda groups, _: grpo(groups, Grpo()))
    monkeypatch.setattr(choices, "ADVANTAGES", {**ADVANTAGES, kind: by_default})
    assert learned(model, tmp_path / "planted", {}, **settings) == usual


def test_pairs_act(
    model: Path,  # noqa: F811
    usual: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = {"preference": "dpo, every=1"}
    assert learned(model, tmp_path / "acts", spec) != usual
    monkeypatch.setattr(trainer, "chosen_preference", lambda _: None)
    assert learned(model, tmp_path / "planted", spec) == usual
