"""A user's own methods: in a file or a plug-in, within bounds, and only by the user's own word."""

# ruff: noqa: E501  bad methods, each in one line

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from node.cli import main
from node.commands.methods_check import check_method, trial_groups, trial_view
from node.config import load_config
from node.interfaces.engine import Outcome, Request
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.choices import advantages, chosen_loss
from node.stages.own import GuardedMethod
from node.stages.stage import BatchGroup, View, Wanted
from node.stages.table import stages_of
from node.verify.held_out import Assignment
from swarm.errors import ConfigError
from tests.unit.test_sapo import CONFIG, FrozenPolicy, change, live, model, rounds

__all__ = ["model"]  # a fixture
TEN_LINES = """
def advantage(groups, scale: float = 1.0):
    return [tuple(scale * (r - max(g.rewards)) for r in g.rewards) for g in groups]
"""
MORE = """
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Le
from node.methods.method import MethodSettings
from node.stages.stage import Stage

@dataclass(frozen=True)
class Halves:
    half: float = 0.5

class Settings(MethodSettings):
    shift: Annotated[int, Le(3)] = 1

def by_default(groups, settings=Halves(0.25)):
    return [tuple(settings.half * r for r in g.rewards) for g in groups]

def by_annotation(groups, settings: Settings):
    return [tuple(settings.shift + r for r in g.rewards) for g in groups]

def untyped(groups, scale=1.0): ...

class KeepShort(Stage):
    class Settings(MethodSettings):
        tokens_max: int = 2

    def select(self, batch, at):
        found = []
        for each in batch:
            made = each.scored.group.completions
            short = [p for p, c in enumerate(made) if len(c.text) <= self.set_to.tokens_max]
            self.acted += len(made) - len(short)
            found.append(each.only(short))
        return [each for each in found if each.scored.rewards]
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TEN_LINES)
    (tmp_path / "more.py").write_text(MORE)
    return tmp_path


def by_flag(**given: str) -> Any:
    return load_config(given, {})


# --- settings ---------------------------------------------------------------------------------


def test_a_function_in_a_file_is_a_method(files: Path) -> None:
    set_to = by_flag(advantage="./mine.py:advantage, scale=2").advantage
    batch = trial_groups(Random(3))
    expected = [tuple(2 * (r - max(g.rewards)) for r in g.rewards) for g in batch]
    assert advantages(batch, set_to) == expected
    name, _, hashed = str(set_to).partition("@")
    assert name == "./mine.py:advantage"
    assert hashed.endswith(", scale=2.0")
    assert len(hashed) == 8 + len(", scale=2.0")
    assert by_flag(advantage=str(set_to)).advantage == set_to  # the text says all of it


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("./more.py:by_default", 0.25),
        ("./more.py:by_default, half=3", 3.0),
        ("./more.py:by_annotation", 2.0),
        ("./more.py:by_annotation, shift=3", 4.0),
    ],
)
def test_settings_by_a_dataclass(files: Path, text: str, value: float) -> None:
    batch = [replace(each, rewards=(1.0,) * 8) for each in trial_groups(Random(3))]
    found = advantages(batch, by_flag(advantage=text).advantage)
    assert found == [(value,) * 8] * len(batch)


@pytest.mark.parametrize(
    ("field", "text", "told"),
    [
        ("advantage", "./mine.py:advantage, scale=x", "scale: Input should be a valid number"),
        ("advantage", "./mine.py:advantage, size=1", "takes no size; it takes scale"),
        ("advantage", "./more.py:by_annotation, shift=4", "less than or equal to 3"),
        ("advantage", "./mine.py:other", "it has no other"),
        ("advantage", "./none.py:advantage", "none.py: No such file"),
        ("advantage", "./more.py:untyped", "its parameter scale needs a type and a default"),
        ("advantage", "./mine.py:advantage@00000000", "is .{8} here, not 00000000"),
        ("filter", "./mine.py:advantage", "filter takes a Stage"),
        ("loss", "./more.py:KeepShort", "a loss is a function and no stage"),
        ("filter", "./more.py:Halves", "subclass of node.stages.stage.Stage"),
        ("filter", "./broken.py:Any", r"SyntaxError: .*broken"),
        ("advantage", "./raises.py:Any", r"ZeroDivisionError: division by zero \(line 2\)"),
        ("advantage", "3000.00001", "no such method; take one of grpo"),
        ("loss", "soft", "no such method; .*TRL's sapo is soft_gate"),
    ],
)
def test_what_is_refused_in_one_line(files: Path, field: str, text: str, told: str) -> None:
    (files / "broken.py").write_text("def (:\n")
    (files / "raises.py").write_text("\n1 / 0\n")
    with pytest.raises(ConfigError, match=told) as caught:
        by_flag(**{field: text})
    assert "\n" not in str(caught.value)


def test_a_chain_of_own_methods(files: Path) -> None:
    (files / "one.py").write_text(KEEP_ONE)
    config = by_flag(filter="./more.py:KeepShort, tokens_max=3, ./one.py:KeepOne")
    assert [type(each.own) for each in config.filter] == [type, type]
    assert [type(each).__name__ for each in stages_of(config).methods] == ["GuardedMethod"] * 2
    with pytest.raises(ConfigError, match="named twice"):
        by_flag(filter="./more.py:KeepShort, ./more.py:KeepShort, tokens_max=3")


def test_a_plug_in_is_named_by_its_entry_point(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = files / "ours-1.2.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: ours\nVersion: 1.2\n")
    (package / "entry_points.txt").write_text("[swarm_node.methods]\nbest = mine:advantage\n")
    monkeypatch.syspath_prepend(str(files))
    assert str(by_flag(advantage="best, scale=3").advantage) == "best@1.2, scale=3.0"


def test_usual_names_and_arxiv_numbers() -> None:
    assert str(by_flag(advantage="2510.21830").advantage) == "gapo"
    assert str(by_flag(advantage="dr.grpo").advantage) == "dr_grpo"
    assert str(by_flag(advantage="reinforce++").advantage) == "reinforce_pp"
    assert str(by_flag(loss="2511.20347").loss) == "soft_gate"
    assert str(by_flag(loss="sapo").loss) == "sapo"


# --- others' code is not run ------------------------------------------------------------------


@pytest.mark.parametrize("table", ["training", "node"])
def test_a_run_file_names_no_code(files: Path, table: str) -> None:
    (files / "mine.py").write_text("raise SystemExit('it ran')\n")
    text = 'name = "r"\n[[environments]]\nname = "scripted_sum"\n'
    run = files / "run.toml"
    for value in ('"./mine.py:losses"', '{ kind = "./mine.py:losses" }'):
        run.write_text(f"{text}[{table}]\nloss = {value}\n")
        with pytest.raises(ConfigError, match="others' code is not run") as caught:
            load_config({}, {}, run)
        assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit):  # the control: by a flag it runs
        by_flag(loss="./mine.py:losses")


# --- in a round -------------------------------------------------------------------------------

KEEP_ONE = """
from node.stages.stage import Stage
class KeepOne(Stage):
    def select(self, batch, at):
        self.acted += len(batch) - 1
        return batch[:1]
class Nothing(Stage):
    pass
"""


def test_own_methods_act_in_rounds(files: Path) -> None:
    (files / "one.py").write_text(KEEP_ONE)

    def trained(**given: str) -> tuple[list[Any], list[dict[str, int]]]:
        own = {name: getattr(by_flag(**given), name) for name in given}
        policy = FrozenPolicy(0.5)
        done = rounds(live(change(CONFIG, **own), policy))
        return policy.batches, [each.acted for each in done]

    batches, acted = trained(filter="./one.py:KeepOne")
    assert [len(batch) for batch in batches] == [1, 1, 1]
    assert all(
        count == 3 and kind.startswith("./one.py:KeepOne@")
        for each in acted
        for kind, count in each.items()
    )
    assert [len(batch) for batch in trained(filter="./one.py:Nothing")[0]] == [4, 4, 4]
    batches, acted = trained(advantage="./mine.py:advantage, scale=2")
    assert all(acted)
    values = {value for batch in batches for group in batch for value in group.advantages}
    assert values == {0.0, -2.0}
    assert {0.0, -2.0} != {v for b in trained()[0] for g in b for v in g.advantages}


PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_word_for_word(
    files: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().partition("## Your own method")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (name,) = re.findall(r"Write `(.*?)`", section)
    (files / name).write_text(code)
    assert len(code.splitlines()) <= 10
    (files / "sums.toml").write_text(
        'name = "sums"\nsampling = { max_new_tokens = 4 }\nheld_out = { tasks = 10 }\n'
        '[[environments]]\nname = "scripted_sum"\nparameters = { max = 9 }\n'
    )
    here = {
        "RUN": "sums.toml", "MODEL": str(model), "EVALUATE_EVERY_ROUNDS": "0", "DHT": "false",
        "LAN": "false", "UPNP": "false", "LISTEN": "/ip4/127.0.0.1/tcp/0", "THREADS": "1",
    }  # fmt: skip
    for key, value in here.items():
        monkeypatch.setenv(f"SWARM_NODE_{key}", value)
    for command in commands.splitlines():
        program, *words = shlex.split(command)
        assert program == "swarm-node"
        assert main(words) == 0, capfd.readouterr().err
    log = (files / "swarm-data" / "events.jsonl").read_text()
    done = [json.loads(line) for line in log.splitlines() if '"acted"' in line]
    acted = [each["acted"] for each in done]
    assert len(acted) == 2
    assert all(kind.startswith("./mine.py:advantage@") for each in acted for kind in each)
    assert all(acted)


# --- what a method may not do -----------------------------------------------------------------

HEAD = """
from dataclasses import replace
from math import nan
from node.methods.method import MethodSettings
from node.stages.stage import More, Stage
class Bad(Stage):
"""


def bad_stage(files: Path, body: str, name: str = "bad.py") -> GuardedMethod:
    (files / name).write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    (set_to,) = by_flag(filter=f"./{name}:Bad").filter
    return GuardedMethod(set_to)


def wanted_of(batch: list[Any]) -> list[Wanted]:
    return [Wanted(Assignment(e.group.task, e.prompt), Request(e.prompt, 8)) for e in batch]


def hooks(stage: GuardedMethod, at: View) -> None:
    """All hooks of a round."""
    scored = trial_groups(Random(1))
    batch = [BatchGroup(each) for each in scored]
    worth = [tuple(each.rewards) for each in scored]
    stage.plan(wanted_of(scored), at)
    stage.lease(8, 8, at)
    stage.more(batch, at)
    stage.foreign_wanted(2, at)
    stage.reward(batch, at)
    stage.replay(batch, at)
    stage.select(batch, at)
    trio.run(stage.advantage, batch, at)
    stage.weigh(batch, worth, at)
    stage.to_record()
    stage.restore(None)


BAD = [
    ("def plan(self, w, at): return [replace(e, request=replace(e.request, limit=10**6)) for e in w]", "1e\\+06 tokens"),
    ("def plan(self, w, at): return [replace(e, request=replace(e.request, n=10**6)) for e in w]", "completions"),
    ("def plan(self, w, at): return [replace(e, weight=nan) for e in w]", "nan as weight"),
    ("def plan(self, w, at): return [replace(e, assigned=replace(e.assigned, task=replace(e.assigned.task, seed=7))) for e in w]", "not the round's"),
    ("def lease(self, width, limit, at): return 10**6, limit", "completions of a task"),
    ("def lease(self, width, limit, at): return width, 10**6", "tokens of a completion"),
    ("def more(self, made, at): return More(tasks=10**6)", "tasks"),
    ("def foreign_wanted(self, wanted, at): return 10**6", "groups of others"),
    ("def reward(self, b, at): return b[:-1]", "other completions"),
    ("def reward(self, b, at): return [replace(e, scored=replace(e.scored, rewards=(nan,) * 8)) for e in b]", "rewards beyond 100"),
    ("def reward(self, b, at): return [replace(e, scored=replace(e.scored, rewards=(1.0,))) for e in b]", "1 rewards for 8"),
    ("def replay(self, b, at): return b * 1000", "completions"),
    ("def select(self, b, at): return b + b", "not in the batch"),
    ("def select(self, b, at): return None", "TypeError: .*NoneType"),
    ("async def advantage(self, b, at): return [(nan,) * 8 for e in b]", "nan as advantage"),
    ("async def advantage(self, b, at): return [(101.0,) * 8 for e in b]", "101 as advantage"),
    ("async def advantage(self, b, at): return [(0.0,)]", "advantages for groups"),
    ("def weigh(self, b, w, at): return [replace(e, weights=(-1.0,) * 8) for e in b], w", "-1 as weight"),
    ("def reward(self, b, at): return [replace(e, scored=replace(e.scored, rewards=(101.0,) * 8)) for e in b]", "rewards beyond 100"),
    ("def weigh(self, b, w, at): return [replace(e, token_advantages=((nan,),) * 8) for e in b], w", "columns that are not finite"),
    ("def replay(self, b, at): return [replace(e, guided=9) for e in b]", "9 completions as guidance"),
    ("def restore(self, record): {}.popitem()", "KeyError"),
    ("def to_record(self): return object()", "TypeError"),
    ("def to_record(self): return 'x' * 5_000_000", "characters of its record"),
    ("def select(self, b, at): at.config.run.limits.group_size_max = 99", "error for RunLimits"),
    ("def select(self, b, at): at.config.group_size = 99", "error for NodeConfig"),
    ("def select(self, b, at): at.number = 99", "FrozenInstanceError"),
    ("def plan(self, w, at): w.clear(); at.config.run.environments[0].parameters = '{}'", "error for EnvironmentSpec"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "told"), BAD)
def test_a_method_stays_within_the_rules(files: Path, body: str, told: str) -> None:
    hooks(bad_stage(files, "pass", "good.py"), trial_view())  # the control
    with pytest.raises(ConfigError, match=r"method \./bad\.py:Bad@.*" + told) as caught:
        hooks(bad_stage(files, body), trial_view())
    assert "\n" not in str(caught.value)


def test_tasks_are_taken_within_bounds(files: Path) -> None:
    with pytest.raises(ConfigError, match="not within 1 and 64"):
        bad_stage(files, "ahead = 10**9")
    idle = bad_stage(files, "def choose(self, due, count, rng, at): return []", "idle.py")
    with pytest.raises(ConfigError, match="takes 0 tasks of 1"):
        idle.choose([("task", 0)], 1, Random(1), trial_view())  # type: ignore[list-item]


@pytest.mark.parametrize("hook", ["select", "reward", "replay"])
def test_what_is_given_bit_by_bit_is_not_lost(files: Path, hook: str) -> None:
    batch = [BatchGroup(each) for each in trial_groups(Random(1))]
    stage = bad_stage(files, f"def {hook}(self, b, at): return (each for each in b)")
    assert getattr(stage, hook)(batch, trial_view()) == batch


PLAIN = {
    "return await sample(wanted)": True,
    "return [replace(each) for each in await sample(wanted)]": True,
    "await sample(wanted); return await sample(wanted)": False,  # the better of two
    "return [replace(e, completions=e.completions[::-1]) for e in await sample(wanted)]": False,
    "return await sample([replace(w, request=replace(w.request, temperature=2.0)) for w in wanted])": False,
    "return [replace(e, completions=(replace(e.completions[0], text='7'),) * 8) for e in await sample(wanted)]": False,
}


@pytest.mark.parametrize("body", PLAIN)
def test_what_is_no_plain_sample_is_not_shared(files: Path, body: str) -> None:
    scored = trial_groups(Random(1))

    async def sample(wanted: object, noise: float = 0.0) -> list[Outcome]:
        await trio.lowlevel.checkpoint()
        return [Outcome(each.group.completions) for each in scored]

    stage = bad_stage(files, f"async def generate(self, wanted, at, sample): {body}")
    made = trio.run(stage.generate, wanted_of(scored), trial_view(), sample)
    assert {each.private for each in made} == {not PLAIN[body]}


def test_a_group_of_two_temperatures_is_not_shared() -> None:
    one, *_ = map(BatchGroup, trial_groups(Random(1)))
    hot = replace(one.scored, group=replace(one.scored.group, temperature=2.0))
    assert not one.joined(one).private
    assert one.joined(replace(one, scored=hot)).private


def test_a_method_gets_copies_of_the_rounds_lists(files: Path) -> None:
    batch = [BatchGroup(each) for each in trial_groups(Random(1))]
    stage = bad_stage(files, "def select(self, b, at):\n    b.clear()\n    return b")
    assert stage.select(batch, trial_view()) == []
    assert len(batch) == 6


def test_an_exception_ends_the_node_with_one_line(files: Path) -> None:
    stage = "def select(self, b, at):\n    return 1 / 0"
    bad_stage(files, stage)
    own = by_flag(filter="./bad.py:Bad").filter
    with pytest.raises(BaseException) as caught:  # noqa: PT011  groups of errors around it
        live(change(CONFIG, filter=own), FrozenPolicy(0.5))
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, ConfigError)
    assert str(error).endswith("ZeroDivisionError: division by zero (line 8)")


def test_only_own_methods_are_wrapped(files: Path) -> None:
    assert not any(
        isinstance(each, GuardedMethod)
        for each in stages_of(by_flag(external_rule="adaptive_external")).methods
    )
    assert any(
        isinstance(each, GuardedMethod)
        for each in stages_of(by_flag(advantage="./mine.py:advantage")).methods
    )


# --- losses -----------------------------------------------------------------------------------


def test_a_loss_goes_to_the_trainer_by_its_text(files: Path) -> None:
    from node.methods.losses import objective_of  # torch

    (files / "loss.py").write_text(
        "def losses(tokens, scale: float = 1.0):\n"
        "    return -scale * tokens.advantages * tokens.logprobs\n"
        "def short(tokens): return tokens.logprobs[:-1]\n"
        "def nan(tokens): return tokens.logprobs * float('nan')\n"
    )
    import torch

    from node.methods.losses import Tokens

    spec = TrainerSpec.from_record(
        TrainerSpec("m", loss=str(by_flag(loss="./loss.py:losses, scale=2").loss)).to_record()
    )
    column = torch.tensor([-1.0, -2.0])
    tokens = Tokens(column, column, column, torch.tensor([1.0, 3.0]))
    set_to = chosen_loss(spec.loss)
    assert objective_of(set_to).losses(tokens, set_to).each.tolist() == [2.0, 12.0]
    for name, told in (("short", r"\(1,\) losses for \(2,\)"), ("nan", "not finite")):
        set_to = chosen_loss(f"./loss.py:{name}")
        with pytest.raises(ConfigError, match=told):
            objective_of(set_to).losses(tokens, set_to)


# --- methods check ----------------------------------------------------------------------------


def checked(text: str, family: Any = None) -> tuple[bool, list[str]]:
    lines: list[str] = []
    is_good = check_method(text, family, lines.append)
    return is_good, lines


PLANTED: list[tuple[str, str, Callable[[str], bool]]] = [
    ("return [tuple(1e9 * r for r in g.rewards) for g in groups]", "bounds", lambda s: "rewards " in s),
    ("import random; return [tuple(random.random() for _ in g.rewards) for g in groups]", "pure", lambda s: "second time" in s),
    ("found = [g.rewards for g in groups]; groups.reverse(); return found", "pure", lambda s: "changes its input" in s),
    ("return [tuple(float(n) for _ in g.rewards) for n, g in enumerate(groups)]", "order", lambda s: "another order" in s),
    ("import time; time.sleep(0.4); return [g.rewards for g in groups]", "speed", lambda s: "above 50" in s),
]  # fmt: skip


@pytest.mark.parametrize(("body", "name", "is_told"), PLANTED)
def test_each_check_finds_its_fault(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    name: str,
    is_told: Callable[[str], bool],
) -> None:
    monkeypatch.setattr("node.commands.methods_check.BATCHES", 2)
    (files / "bad.py").write_text(f"def advantage(groups): {body}\n")
    is_good, lines = checked("./bad.py:advantage")
    assert not is_good
    (line,) = (line for line in lines if line.split()[0] == name)
    assert is_told(line)
    assert checked("./mine.py:advantage")[0]  # the control


def test_losses_corrections_stages_and_built_in_methods_are_checked(files: Path) -> None:
    assert checked("rloo")[0]
    assert checked("bapo", "loss")[0]
    assert checked("icepop")[0]
    assert checked("./more.py:KeepShort, tokens_max=3")[0]
    with pytest.raises(ConfigError, match="it is of advantage, loss: name one by --family"):
        checked("grpo")
    with pytest.raises(ConfigError, match="no such method"):
        checked("gpro")
    with pytest.raises(ConfigError, match="dpo: no check on batches for a preference"):
        checked("dpo")
    with pytest.raises(ConfigError, match="scale"):
        checked("./mine.py:advantage, scale=x")
