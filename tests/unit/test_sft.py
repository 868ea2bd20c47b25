"""Supervised fine-tuning: its gradient, its resumption, its files, and each refused input."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.cli import main
from node.commands import sft
from node.config import NodeConfig, load_config
from node.envs.data.worked import PromptRules, Worked, read_worked
from node.interfaces.prompts import Prompt
from node.policies.policy import load_policy
from node.train.trainer import GroupTrainer
from swarm.errors import ChildFailed, ConfigError
from tests.unit.training_support import qwen_directory

ROWS = [{"question": f"{a}+{b}=", "answer": f"{a} and {b} is {a + b}"} for a in range(5)
        for b in range(4)]  # fmt: skip
ANSWERS = [Worked(row["question"], row["answer"]) for row in ROWS]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return qwen_directory(tmp_path / "model")


def settings(model: Path, **more: Any) -> NodeConfig:
    flags = {"model": str(model), "threads": 1, "learning_rate": 3e-3, **more}
    return load_config(flags, {})


def plan(out: Path, **more: Any) -> sft.Plan:
    return sft.Plan(**{"out": out, "epochs": 3, "batch": 4, "held_out": 0.2, **more})


def tuned(out: Path, model: Path, *, answers: list[Worked] = ANSWERS, **more: Any) -> list[str]:
    lines: list[str] = []
    sft.fine_tune(settings(model), plan(out, **more), answers, lines.append)
    return lines


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_the_loss_falls_and_the_model_is_whole(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    lines = tuned(out, model, epochs=6)
    measured = [float(line.rpartition(" ")[2]) for line in lines if "held-out loss" in line]
    assert len(measured) == 7  # before, and after each epoch
    assert measured[-1] < measured[0] - 0.5
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*(path.name for path in model.iterdir()), sft.WORK]
    )
    assert [path.name for path in (out / sft.WORK).iterdir()] == [sft.ARGUMENTS]
    policy, before = load_policy(str(out), "cpu"), load_policy(str(model), "cpu")
    assert policy.fingerprint == before.fingerprint
    assert tuned(out, model, epochs=6) == [
        f"{out}: finished before; name another --out to train again"
    ]


def test_the_gradient_is_that_of_the_mean_over_answer_tokens(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, torch.Tensor] = {}

    def clipped(trainer: GroupTrainer, norm_max: float) -> float:
        named = trainer.policy.model.named_parameters()
        found.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return 1.0

    monkeypatch.setattr(GroupTrainer, "_clip_gradient", clipped)
    tuned(tmp_path / "out", model, epochs=1, batch=len(ANSWERS), held_out=0.0)
    policy = load_policy(str(model), "cpu")
    network = policy.model.double()
    loss, tokens = torch.zeros((), dtype=torch.float64), 0
    for prompt, answer in ANSWERS:
        asked = policy.tokenizer(prompt)["input_ids"]
        said = [*policy.tokenizer(answer, add_special_tokens=False)["input_ids"], policy.eos_id]
        logs = network(torch.tensor([asked + said])).logits[0].log_softmax(-1)
        for place, token in enumerate(said, len(asked)):
            loss = loss - logs[place - 1, token]
            tokens += 1
    (loss / tokens).backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-4, atol=1e-6)


KILLED = """
import os, signal, sys
from node.cli import main
from node.train.trainer_worker import TrainerCore
name, left = sys.argv[1], int(sys.argv[2])
real = getattr(TrainerCore, name)
def dies(core, *given):
    global left
    found, left = real(core, *given), left - 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(TrainerCore, name, dies)
sys.exit(main(sys.argv[3:]))
"""
KILLS = [("train", 10, "2 epochs"), ("save", 2, "1 epoch"), ("export_whole", 1, "3 epochs")]


@pytest.mark.parametrize(("name", "call", "done"), KILLS)
def test_after_a_kill_the_weights_are_those_of_a_whole_run(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str], name: str, call: int, done: str
) -> None:
    data, out = write(tmp_path / "data.jsonl", *ROWS), tmp_path / "killed"
    words = ["sft", str(data), "--model", str(model), "--out", str(out), "--threads", "1"]
    words += ["--batch", "4", "--held-out", "0.2", "--learning-rate", "3e-3"]
    child = [sys.executable, "-c", KILLED, name, str(call), *words]
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    assert not (out / sft.DONE_FILE).exists()
    assert main(words) == 0
    assert f"{done} done before" in capfd.readouterr().out
    tuned(tmp_path / "whole", model)
    torch.testing.assert_close(weights(out), weights(tmp_path / "whole"), rtol=0, atol=0)


def test_other_arguments_are_refused_once_there_is_a_checkpoint(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="longer than the context"):
        tuned(out, model, answers=[Worked("1", "2" * 500)])
    monkeypatch.setattr(sft, "_finish", lambda core, plan: None)
    tuned(out, model, epochs=1)  # the failed call binds nobody
    with pytest.raises(ConfigError, match=r"was begun with batch = 4, not 5; give that"):
        tuned(out, model, epochs=1, batch=5)
    with pytest.raises(ConfigError, match="was begun with data = "):
        tuned(out, model, epochs=1, answers=ANSWERS[1:])
    tuned(out, model, epochs=1)


def test_a_directory_of_others_is_left_alone(tmp_path: Path, model: Path) -> None:
    for out in (model, model / "config.json"):
        with pytest.raises(ConfigError, match="is there, and not of sft"):
            tuned(out, model)


def test_a_directory_at_which_another_works_is_refused(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    [*_, last] = tuned(out, model)
    assert "goes on from it" in last
    with (
        sft._alone(plan(out)),
        pytest.raises(ConfigError, match="another sft is at work on it"),
    ):
        tuned(out, model)
    assert tuned(out, model) == [f"{out}: finished before; name another --out to train again"]


def test_long_answers_are_counted_and_left_out(tmp_path: Path, model: Path) -> None:
    lines = tuned(tmp_path / "out", model, answers=[*ANSWERS, Worked("1", "2" * 500)], epochs=1)
    assert lines[0].startswith("1 of 21 answers, with their questions, are longer than the context "
                               "of 128 tokens")  # fmt: skip
    assert lines[1].startswith("16 answers to train on, 4 held out")


def test_a_loss_that_is_not_finite_keeps_the_last_epoch(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GroupTrainer._forward

    def spoilt_at(update: int) -> list[str]:
        def forward(trainer: GroupTrainer, units: Any, of_logits: Any = None) -> Any:
            is_spoilt = torch.is_grad_enabled() and trainer.policy_version == update
            found = real(trainer, units, of_logits)
            return [each * math.nan for each in found] if is_spoilt else found

        monkeypatch.setattr(GroupTrainer, "_forward", forward)
        ours, lines = plan(tmp_path / str(update), epochs=2), []
        with pytest.raises(ChildFailed) as caught:
            sft.fine_tune(settings(model), ours, ANSWERS, lines.append)
        return [*lines, str(caught.value)]

    assert spoilt_at(0)[-1].startswith("epoch 1: the loss is not finite; nothing was saved before")
    *_, saved, refused = spoilt_at(4)  # the first of the second epoch
    assert saved.startswith("epoch 1 of 2 saved")
    assert refused.endswith("4 holds the model after epoch 1; lower --learning-rate")
    spoilt_at(5)  # one update later; that one is dropped
    torch.testing.assert_close(weights(tmp_path / "5"), weights(tmp_path / "4"), rtol=0, atol=0)


def told(path: Path, *, say: Any = print, **rules: Any) -> list[Worked]:
    return read_worked(path, PromptRules(**rules), say)


def test_rows_are_read_by_their_usual_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl",
        {"id": 1, "prompt": "a", "completion": "b"},
        {"instruction": "a", "input": "c", "output": "b"},
        {"problem": "a", "solution": 7},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                      {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                           {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
    )  # fmt: skip
    found = told(path, system="be short")
    assert [each.answer for each in found] == ["b", "b", "7", "b", "d"]
    chats = [[(m.role, m.content) for m in Prompt.read(each.prompt).messages] for each in found]
    assert chats[0] == [("system", "be short"), ("user", "a")]
    assert chats[1] == [("system", "be short"), ("user", "a\n\nc")]
    assert chats[3] == [("system", "s"), ("user", "a")]
    assert chats[4][1:] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert told(write(tmp_path / "x.jsonl", {"q": "a", "a": "b"}), question="q", answer="a") == [
        Worked("a", "b")
    ]


def test_the_prompt_is_that_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"question": "a", "answer": "b"})
    [found] = told(path, system="s", examples=(("1", "2"),))
    assert found.prompt == Prompt.of("a", "s", (("1", "2"),)).text


def test_parquet_is_read_with_all_columns(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"id": [1], "response": ["b"], "question": ["a"]}), path)
    assert told(path) == [Worked("a", "b")]


CHAT = [{"role": "user", "content": "a"}]
REFUSED = [
    ({"question": "a", "text": "b"}, "line 2: no answer: the columns are question, text; name"),
    ({"q": "a", "answer": "b"}, "line 2: no question: the columns are q, answer; name one by --q"),
    ({"question": "a", "answer": " "}, "line 2: its column answer is no text or empty"),
    ({"question": ["a"], "answer": "b"}, "line 2: its column question is no text or empty"),
    ({"question": "\x1e" + '[["user","x"]]', "answer": "b"}, "line 2: its question begins with"),
    ({"question": "a", "answer": "\ud800"}, "line 2: half a character"),
    ({"messages": CHAT}, "line 2: its chat must end in an answer of the assistant"),
    ({"messages": "a"}, "line 2: its chat is no list of messages"),
    ({"messages": [*CHAT, {"role": "assistant", "content": ""}]}, "a message of assistant without"),
    (["a"], "line 2: not an object"),
]


@pytest.mark.parametrize(("row", "why"), REFUSED)
def test_a_row_without_a_worked_answer_is_told_by_number(
    tmp_path: Path, row: Any, why: str
) -> None:
    path = write(tmp_path / "data.jsonl", ROWS[0], row)
    lines: list[str] = []
    assert len(told(path, say=lines.append)) == 1
    assert lines[0] == "data.jsonl: left out: 1 of 2 rows"
    assert why.removeprefix("line 2: ") in lines[1]
    assert lines[1].endswith(": line 2")
    with pytest.raises(ConfigError, match=r"no rows; data\.jsonl (line|row) 1: ") as caught:
        told(write(path, row))
    assert "\n" not in str(caught.value)


def test_wrong_files_and_numbers_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    empty, good = write(tmp_path / "empty.jsonl"), write(tmp_path / "good.jsonl", *ROWS)

    def ask(data: Path, *more: str) -> list[str]:
        return ["sft", str(data), "--model", str(model), "--out", str(tmp_path / "out"), *more]

    for words, why in (
        (ask(tmp_path / "none.jsonl"), "none.jsonl: no such file; name one of worked answers"),
        (ask(empty), "empty.jsonl: no rows; write one JSON object a line"),
        (ask(good, "--epochs", "0"), "--epochs 0: must be at least 1"),
        (ask(good, "--batch", "0"), "--batch 0: must be at least 1"),
        (ask(good, "--held-out", "0.9"), "--held-out 0.9: must be from 0 to 0.5"),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
