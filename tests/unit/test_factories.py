"""Classes written for TRL's `environment_factory`: described, called, replayed, or refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from node.config import RunConfig
from node.envs.base import Undecided
from node.envs.factory import EnvironmentFactory
from node.envs.factory_rules import rules_from
from node.envs.factory_upstream import check
from node.envs.method_calls import BRACKETS_MAX, answered, calls_in, written
from node.envs.package_identity import identify
from node.envs.registry import needs_sandbox
from node.envs.replay_turns import forgery, replies
from node.envs.scoring import right_turns
from node.hosting.run_data import _checked
from swarm.errors import ConfigError, Reject
from swarm.rollouts import Task

FACTORIES = Path(__file__).parents[1] / "factories"
WORDS: dict[str, Any] = {"factory": "word_guess:WordEnv", "rows": "ROWS", "reward": "reward_func"}
SHOP: dict[str, Any] = {"factory": "shop_counter:Shop"}
LAMPS: dict[str, Any] = {"factory": "lamp_switch:Lamps", "rows": "ROWS", "solution": "turns"}
SOURCE = EnvironmentFactory()


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FACTORIES))


def settled(parameters: dict[str, Any]) -> dict[str, Any]:
    return {**parameters, "sha256": check(rules_from(parameters)).sha256}


def task_of(parameters: dict[str, Any], index: int = 0) -> Task:
    text = json.dumps(settled(parameters), sort_keys=True)
    return Task(SOURCE.name, SOURCE.version, text, 5, index)


def buying(prompt: str, *, pays: int = 0) -> list[str]:
    """Turns that buy what a prompt of the shop asks for."""
    prices = {"apple": 3, "bread": 7, "candle": 12, "drum": 40}
    words = prompt.rpartition("Buy ")[2].partition(",")[0].split(" and ")
    wanted = {name: int(count) for count, name in (each.split(" x ") for each in words)}
    total = pays or sum(prices[name] * count for name, count in wanted.items())
    added = "".join(written("add", {"name": n, "count": c}) for n, c in wanted.items())
    return [added, written("pay", {"amount": total}), "Thank you."]


# --- turns ----------------------------------------------------------------------------------------


def test_methods_are_described_and_called_by_name_and_keep_the_games_state() -> None:
    problem = SOURCE.problem(task_of(SHOP))
    tools = [json.loads(line) for line in problem.prompt.splitlines() if line.startswith('{"type')]
    assert [each["function"]["name"] for each in tools] == ["add", "pay", "price"]
    assert tools[0]["function"]["parameters"]["required"] == ["name"]
    assert tools[0]["function"]["parameters"]["properties"]["count"]["description"] == "How many"
    turns = buying(problem.prompt)
    said = replies(SOURCE, problem, turns)
    assert said[0] is not None
    assert said[0].count("<tool_response>\nto pay: ") == 2
    assert said[1:] == [f"<tool_response>\npaid: {said[0].split()[-2]}\n</tool_response>", None]
    assert SOURCE.worth(problem, turns) == 1.0
    assert SOURCE.worth(problem, buying(problem.prompt, pays=1)) == 0.5
    assert SOURCE.worth(problem, turns[-1:]) == 0.0


def test_an_error_is_a_reply_as_trl_has_it() -> None:
    problem = SOURCE.problem(task_of(WORDS))
    calls = [
        written("guess", {"guess": "toolong"}),
        written("reset", {}),
        written("guess", {"a": 1}),
    ]
    calls += ['<tool_call>{"name": "guess", "arguments": "crane"}</tool_call>']
    said = replies(SOURCE, problem, calls)
    errors = [
        "{'error': 'toolong has not 5 letters.'}",
        "{'error': 'Tool reset not found.'}",
        "{'error': \"WordEnv.guess() got an unexpected keyword argument 'a'\"}",
        "{'error': 'arguments must be an object'}",
    ]
    assert said == [f"<tool_response>\n{error}\n</tool_response>" for error in errors]


def test_a_game_that_is_over_says_so_and_the_reward_function_sees_the_environment() -> None:
    problem = SOURCE.problem(task_of(WORDS))
    guess = written("guess", {"guess": "zzzzz"})
    said = replies(SOURCE, problem, [guess] * 4 + ["I give up."])
    assert said[-2:] == ["<tool_response>\n{'error': 'Game over.'}\n</tool_response>", None]
    assert SOURCE.worth(problem, [guess] * 4) == 0.0


def test_a_receiver_plays_the_same_game_and_tells_a_forged_result() -> None:
    problem = SOURCE.problem(task_of(SHOP, index=3))
    turns = buying(problem.prompt)
    said = replies(EnvironmentFactory(), problem, turns)
    texts = [turns[0], said[0], turns[1], said[1], turns[2]]
    parts = [(at % 2 == 0, str(text)) for at, text in enumerate(texts)]
    assert forgery(SOURCE, problem, (False, parts)) is None
    parts[1] = (False, "<tool_response>\nto pay: 1\n</tool_response>\n")
    assert forgery(SOURCE, problem, (False, parts)) is Reject.FORGED_TOOL_RESULT


def test_games_that_take_turns_with_each_other_stay_apart() -> None:
    one, other = (SOURCE.problem(task_of(SHOP, index=index)) for index in (1, 2))
    alone = [replies(SOURCE, each, buying(each.prompt)) for each in (one, other)]
    states = [SOURCE.begin(one), SOURCE.begin(other)]
    mixed: list[list[str | None]] = [[], []]
    for turn in range(3):
        for place, problem in enumerate((one, other)):
            text = buying(problem.prompt)[turn]
            states[place], reply = SOURCE.reply(problem, states[place], text)
            mixed[place].append(reply)
    assert mixed == alone


def test_calls_of_the_last_turn_are_not_made() -> None:
    problem = SOURCE.problem(task_of({**SHOP, "turns": 2}))
    turns = buying(problem.prompt)
    assert replies(SOURCE, problem, turns[:2])[1] is None
    assert SOURCE.worth(problem, turns[:2]) == 0.5  # it did not pay


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "a"}',
        '<tool_call>{"name": "a"}</tool_call><tool_call>{</tool_call>',
        f'<tool_call>{{"name": "a", "arguments": {"[" * 100_000}</tool_call>',
        '<think>I could <tool_call>{"name": "a"}</tool_call>',
        '<think>I could <tool_call>{"name": "a"}</tool_call></think>No.',
    ],
)
def test_a_malformed_call_is_text(text: str) -> None:
    assert calls_in(text) == []


def test_calls_are_read_behind_a_thought_and_brackets_in_strings_count_nothing() -> None:
    code = "[" * BRACKETS_MAX + '"' + "\\"
    text = f"<think>hm</think>Well.\n{written('run', {'code': code})}\n{written('stop', {})}"
    assert [tuple(each) for each in calls_in(text)] == [("run", {"code": code}), ("stop", {})]


@pytest.mark.parametrize("results", [["x" * 5000], ["x" * 5000, "y", "z" * 3000]])
def test_long_results_are_cut_and_all_are_there(results: Sequence[str]) -> None:
    reply = answered(results, 2048)
    assert len(reply) <= 2048
    assert reply.count("\n</tool_response>") == len(results)
    assert "…" in reply


# --- tasks ----------------------------------------------------------------------------------------


def test_a_solution_reaches_a_full_score_and_warms_a_policy_up() -> None:
    task = task_of(LAMPS)
    turns = right_turns(task)
    assert turns is not None
    assert [reply for _, reply in turns] == ["<tool_response>\nlit\n</tool_response>", ""]
    assert turns[1][0].startswith("Lamp ")
    with pytest.raises(ConfigError, match="knows no turns that reach a full score"):
        right_turns(task_of(SHOP))


def test_tasks_without_rows_or_with_the_same_prompt_are_told_apart() -> None:
    prompts = {SOURCE.problem(task_of(SHOP, index)).prompt for index in range(20)}
    assert len(prompts) == 20
    assert len({SOURCE.problem(task_of(WORDS, index)).prompt for index in range(12)}) == 12


def test_it_is_for_a_sandbox_alone_and_a_peers_is_agreed_to_first() -> None:
    assert needs_sandbox(SOURCE.name)
    rules = {**SHOP, "sha256": "0" * 64}
    entry = {"name": SOURCE.name, "parameters": rules}
    run = RunConfig.model_validate({"name": "far", "environments": [entry]})
    with pytest.raises(ConfigError, match="the installed factory 'shop_counter:Shop'"):
        _checked(run.as_json(), run.run_id, lambda question: False)
    with pytest.raises(ConfigError, match="install the package that the run's founder has"):
        SOURCE.problem(Task(SOURCE.name, SOURCE.version, json.dumps(rules), 1, 1))
    with pytest.raises(ConfigError, match="no sha256"):
        SOURCE.settled(SHOP, None)


# --- what is refused ------------------------------------------------------------------------------

SOUND = '''
class Env:
    def reset(self, **kwargs):
        self.reward = 0.0
    def go(self, where: str) -> str:
        """Go.

        Args:
            where: a direction
        """
        return where
'''


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("def reset", "def restart", "it has no method reset"),
        ("            where: a direction\n", "", "no description for the argument 'where'"),
        ("where: str", "where", "missing a type hint"),
        ("self.reward = 0.0", "pass", "cannot tell a game's reward"),
        ("self.reward = 0.0", "self.reward = 3.5", "a reward is from 0 to 1"),
        ("self.reward = 0.0", "raise OSError('no server')", r"cannot begin \(OSError: no server\)"),
        ("        return where", "        raise MemoryError", "cannot answer"),
        ("class Env", "import no_such_thing\nclass Env", "cannot be loaded"),
        ("class Env:", "class Other:", "has no attribute 'Env'"),
    ],
)
def test_a_class_that_keeps_no_contract_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, why: str
) -> None:
    name = f"unfit_{abs(hash((old, new)))}"
    assert old in SOUND
    (tmp_path / f"{name}.py").write_text(SOUND.replace(old, new, 1))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=why) as caught:
        check(rules_from({"factory": f"{name}:Env"}))
    assert f"environment environment_factory: {name}:Env: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"factory": "shop_counter"}, "factory = 'shop_counter'"),
        ({"rows": "no such"}, "rows = 'no such'"),
        ({"rows": "PRICES"}, "row 1 is no table of columns"),
        ({"rows": "MISSING"}, "has no attribute 'MISSING'"),
        ({"turns": 0}, "turns = '0'"),
        ({"colour": 1}, "colour: no such parameter; known: factory, rows"),
        ({"factory": "no_such_package:Env"}, "cannot be loaded"),
    ],
)
def test_wrong_parameters_are_one_line(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=r"^environment environment_factory: ") as caught:
        check(rules_from({**SHOP, **change}))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_games_that_do_not_end_are_told_without_a_parameter_that_there_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.envs.package_identity.FIND_WALL_S", 0.1)
    with pytest.raises(ConfigError, match=r"not done after 0\.1 s; a call may never end") as caught:
        identify(rules_from({**SHOP, "turns": 3}))
    assert "parameter tasks" not in str(caught.value)


def test_memory_that_runs_out_is_undecided() -> None:
    from node.envs.factory_upstream import FactorySource

    source = FactorySource(rules_from(SHOP))
    game = source.game(0, "1")

    def runs_out(names: list[str]) -> None:
        raise MemoryError

    game._environment.price = runs_out
    with pytest.raises(Undecided):
        game.take(written("price", {"names": []}))
