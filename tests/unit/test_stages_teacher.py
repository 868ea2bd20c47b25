"""A round in which a served model says how likely own completions are to it. The server is a real
one, of vLLM's routes, over the tiny policy."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config import NodeConfig
from node.hosting.models import check_teacher, trainer_spec
from node.methods.groups import Advantages
from node.methods.losses import taught
from node.methods.method import MethodSettings
from node.run.sapo import Sapo
from node.stages.stage import BatchGroup, Stage, View
from node.stages.teacher import LearnFromTeacher
from swarm.errors import ConfigError
from tests.openai_server import Handler, OpenAiTestServer, no_such_server, openai_server
from tests.support import run as run_async
from tests.unit.stages_support import RUN, Played, Student, config_of, play
from tests.unit.training_support import open_policy, qwen_directory


class Teacher:
    """Answers as vLLM does, in one thread after another."""

    def __init__(self, directory: Path) -> None:
        self.policy = open_policy(directory)
        self.shift = 0  # of all ids that it tells
        self.tells = True

    def logprobs(self, ids: list[int]) -> list[float]:
        """Of each token but the first."""
        with torch.no_grad():
            logits = self.policy.model(torch.tensor([ids])).logits[0].float()
        logs = logits.log_softmax(-1)
        return [float(logs[at, token]) for at, token in enumerate(ids[1:])]

    def answer(self, handler: Handler) -> None:
        asked = handler.asked
        if handler.path == "/tokenize":
            text = asked.get("prompt") or asked["messages"][-1]["content"]
            is_bare = asked.get("add_special_tokens") is False
            encode = self.policy.encode_completion if is_bare else self.policy.encode_prompt
            handler.reply({"tokens": [each + self.shift for each in encode(text)]})
            return
        ids = asked["prompt"]
        rows: list[Any] = [None]
        rows += [
            {str(token): {"logprob": log, "rank": 1, "decoded_token": ""}}
            for token, log in zip(ids[1:], self.logprobs(ids), strict=True)
        ]
        more = {"prompt_logprobs": rows} if self.tells else {}
        handler.say("x", **more)


@pytest.fixture
def teacher(tmp_path: Path) -> Teacher:
    return Teacher(qwen_directory(tmp_path / "teacher"))


@pytest.fixture
def served(teacher: Teacher) -> Iterator[OpenAiTestServer]:
    with openai_server() as found:
        found.answer = teacher.answer
        yield found


def config_with(url: str, more: str = "") -> NodeConfig:
    return config_of(replay=f"teacher, url={url}, weight=0.5{more}")


def lesson(url: str, more: str = "", change: Callable[[Sapo], None] = lambda _: None) -> Played:
    """One round. Its tokens are bytes, which the teacher has ids of."""
    student = Student(0.5)
    student._generate_s = student._train_s = 0.0
    return play(config_with(url, more), student, 1, change=change, virtual=False)


def told(played: Played, teacher: Teacher) -> bool:
    """Whether the columns of all that was trained on are the teacher's own log-probs."""
    for group in played.policy.batches[0]:
        context = teacher.policy.encode_prompt(group.prompt)
        for made, column in zip(group.completions, group.teacher_logprobs or [()] * 4, strict=True):
            wanted = teacher.logprobs([*context, *made.token_ids])[len(context) - 1 :]
            if list(column) != pytest.approx(wanted, abs=1e-5):
                return False
    return True


def test_each_own_token_has_the_teachers_log_prob(
    served: OpenAiTestServer, teacher: Teacher
) -> None:
    played = lesson(served.url)
    assert played.acted("teacher") == 16
    assert told(played, teacher)


class Doubled(Stage[MethodSettings]):
    """Adds a group once the advantages are known, as `nudges` does."""

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        return [*batch, batch[0]], [*worth, worth[0]]


def test_groups_that_another_method_adds_have_no_columns(served: OpenAiTestServer) -> None:
    def change(sapo: Sapo) -> None:
        sapo.stages.methods = [Doubled(MethodSettings()), *sapo.stages.methods]

    batch = lesson(served.url, change=change).policy.batches[0]
    assert [bool(each.teacher_logprobs) for each in batch] == [True] * 4 + [False]


@pytest.mark.parametrize("hooks", [["weigh"], ["weigh", "advantage"]])
def test_without_what_it_does_there_are_none(
    hooks: list[str],
    served: OpenAiTestServer,
    teacher: Teacher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for hook in hooks:
        monkeypatch.setattr(LearnFromTeacher, hook, getattr(Stage, hook))
    assert not told(lesson(served.url), teacher)


def test_a_round_goes_on_without_a_teacher_that_is_away_or_slow(
    served: OpenAiTestServer,
) -> None:
    for url, more in ((no_such_server(), ""), (served.url, ", wait_s=0.000001")):
        played = lesson(url, more)
        assert played.acted("teacher") == 0
        assert [each.teacher_logprobs for each in played.policy.batches[0]] == [()] * 4


def test_one_answer_that_is_none_costs_no_others(served: OpenAiTestServer) -> None:
    served.faults = [lambda handler: handler.reply({"tokens": ["x"]})]
    assert lesson(served.url).acted("teacher") == 12


def test_the_trainer_is_told_its_weight() -> None:
    config = config_with("http://127.0.0.1:1/v1")
    assert trainer_spec(config, "m").teacher_weight == 0.5
    assert trainer_spec(config_of(), "m").teacher_weight == 0.0
    logs = torch.tensor([-1.2, -1.2])  # of the student; the teacher's are -0.7 and -3.2
    found = taught(torch.zeros(2), logs, torch.tensor([-0.7, -3.2]), 1.0)
    assert found.tolist() == pytest.approx([0.5, -2.0])


# --- at the start --------------------------------------------------------------------------------


def checked(url: str, model: Path, **settings: Any) -> None:
    config = config_of(replay=f"teacher, url={url}", **settings)
    run_async(lambda: check_teacher(config, str(model)))


def test_a_teacher_of_the_same_tokenizer_is_taken(served: OpenAiTestServer, tmp_path: Path) -> None:
    checked(served.url, tmp_path / "teacher")
    run_async(lambda: check_teacher(config_of(), "none"))  # nothing is asked


def test_teachers_that_cannot_judge_are_refused_by_name(
    served: OpenAiTestServer, teacher: Teacher, tmp_path: Path
) -> None:
    model = tmp_path / "teacher"
    cool = RUN.model_copy(update={"sampling": RUN.sampling.model_copy(update={"temperature": 0.5})})
    with pytest.raises(ConfigError, match="must sample with temperature"):
        checked(served.url, model, run=cool)
    with pytest.raises(ConfigError, match="key_env=NONE_SUCH: that variable is not set"):
        run_async(lambda: check_teacher(config_with(served.url, ", key_env=NONE_SUCH"), "m"))
    with pytest.raises(ConfigError, match="--replay teacher, url="):
        checked(no_such_server(), model)
    teacher.tells = False
    with pytest.raises(ConfigError, match="tells no log-probs of given tokens"):
        checked(served.url, model)
    teacher.tells, teacher.shift = True, 1
    with pytest.raises(ConfigError, match="its tokenizer has other ids"):
        checked(served.url, model)
