"""Weights that a trainer lends: the engine reads the trainer's own memory, or says why not."""

import pickle  # noqa: TID251 - what is refused
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from node.interfaces.adapter_files import AdapterShape
from node.policies import adapters, checkpoint
from node.policies.ipc_weights import LENT, Lender, NotLent, borrow, let_go
from node.policies.policy import Policy
from tests.unit.training_support import open_policy, qwen_directory

CPU = torch.device("cpu")
TIMEOUT_S = 120.0
# Another process: prints the sum of one tensor, then sets it to zero where it lies.
BORROWER = """
import sys, torch
from pathlib import Path
from node.policies.ipc_weights import borrow, let_go
tensors = borrow(Path(sys.argv[1]), torch.device("cpu"))
print(len(tensors), tensors[sys.argv[2]].double().sum().item())
tensors[sys.argv[2]].zero_()
let_go(tensors, torch.device("cpu"))
assert not tensors
"""
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return open_policy(qwen_directory(tmp_path / "model"))


def exported(policy: Policy, directory: Path) -> Path:
    directory.mkdir()
    checkpoint.export_whole(directory, policy)
    return directory


@pytest.mark.slow
def test_another_process_has_the_tensors_where_they_lie(policy: Policy, tmp_path: Path) -> None:
    directory = exported(policy, tmp_path / "version")
    assert Lender(policy).lend(directory) is None
    weight = policy.model.state_dict()[NAME]
    with torch.no_grad():
        weight[0, 0] = 1000.0  # after it was lent: nothing was copied
    command = [sys.executable, "-c", BORROWER, str(directory), NAME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    count, total = done.stdout.split()
    tied = int(policy.model.config.tie_word_embeddings)  # the files have the head once
    assert int(count) == len(policy.model.state_dict()) - tied
    assert float(total) > 900.0
    assert not weight.any()


def test_what_is_merged_in_the_files_is_not_lent(policy: Policy, tmp_path: Path) -> None:
    adapters.attach(policy, AdapterShape(4, 8.0, ()), 0)
    directory = exported(policy, tmp_path / "version")
    assert Lender(policy).lend(directory) == "in the files the adapter is merged"
    with pytest.raises(NotLent, match=LENT):
        borrow(directory, CPU)


def test_files_of_another_shape_or_type_are_read(policy: Policy, tmp_path: Path) -> None:
    directory = exported(policy, tmp_path / "version")
    held = policy.model.model.layers[1].mlp.up_proj
    whole = held.weight.data
    held.weight.data = whole.to(torch.bfloat16)
    assert NAME in (Lender(policy).lend(directory) or "")
    held.weight.data = whole[:-1]
    assert NAME in (Lender(policy).lend(directory) or "")
    held.weight.data = whole
    assert Lender(policy).lend(directory) is None


def test_what_lies_on_another_device_is_read(policy: Policy, tmp_path: Path) -> None:
    directory = exported(policy, tmp_path / "version")
    assert Lender(policy).lend(directory) is None
    lent = (directory / LENT).read_bytes().partition(b"\n")[2]
    (directory / LENT).write_bytes(b"GPU 7\n" + lent)
    with pytest.raises(NotLent, match="the trainer is on GPU 7, the engine on cpu"):
        borrow(directory, CPU)


def test_a_policy_is_lent_again_and_again(policy: Policy, tmp_path: Path) -> None:
    lender, weight = Lender(policy), policy.model.state_dict()[NAME]
    directory = exported(policy, tmp_path / "version")
    for step in range(3):
        with torch.no_grad():
            weight[0, 0] = step
        assert lender.lend(directory) is None
        tensors = borrow(directory, CPU)
        assert tensors[NAME][0, 0] == step
        let_go(tensors, CPU)


def test_handles_of_a_gpu_are_made_once_while_its_tensors_stay_where_they_are(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    dump = ForkingPickler.dump

    def counted(self: ForkingPickler, what: dict[str, torch.Tensor]) -> None:
        made.append(len(what))
        dump(self, what)

    monkeypatch.setattr(ForkingPickler, "dump", counted)
    lender, directory = Lender(policy), exported(policy, tmp_path / "version")
    lender.lend(directory)
    lender.lend(directory)
    assert len(made) == 2  # on a CPU, each time
    lender._keeps = True
    lender.lend(directory)
    first = (directory / LENT).read_bytes()
    assert len(made) == 2
    projection = policy.model.model.layers[1].mlp.up_proj
    projection.weight.data = projection.weight.data.clone()
    lender.lend(directory)
    assert len(made) == 3
    assert (directory / LENT).read_bytes() != first


def test_a_device_that_shares_nothing_leaves_the_files(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cudaIpcGetMemHandle: operation not supported\nand more")

    monkeypatch.setattr(ForkingPickler, "dump", refuse)
    directory = exported(policy, tmp_path / "version")
    said = Lender(policy).lend(directory)
    assert said is not None
    assert said.endswith("(cudaIpcGetMemHandle: operation not supported)")
    assert not (directory / LENT).exists()


@pytest.mark.parametrize("cut", [0, 1, 500])
def test_handles_that_are_cut_short_are_no_crash(policy: Policy, tmp_path: Path, cut: int) -> None:
    directory = exported(policy, tmp_path / "version")
    assert Lender(policy).lend(directory) is None
    lent = (directory / LENT).read_bytes()
    (directory / LENT).write_bytes(lent[:cut])
    with pytest.raises(NotLent):
        borrow(directory, CPU)


class Planted:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_nothing_but_tensors_is_made(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / LENT).write_bytes(b"cpu\n" + pickle.dumps(Planted(planted)))
    with pytest.raises(NotLent, match="is no part of a tensor"):
        borrow(tmp_path, CPU)
    assert not planted.exists()
    pickle.loads(pickle.dumps(Planted(planted)))  # noqa: S301 - what would have happened
    assert planted.exists()


def test_what_was_borrowed_is_let_go(policy: Policy, tmp_path: Path) -> None:
    directory = exported(policy, tmp_path / "version")
    assert Lender(policy).lend(directory) is None
    tensors = borrow(directory, CPU)
    assert tensors[NAME].equal(policy.model.state_dict()[NAME])
    let_go(tensors, CPU)
    assert tensors == {}
