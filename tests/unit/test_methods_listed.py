"""The list of methods: whole, true of what the loops take, and said in lines."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from node.cli import main
from node.commands.methods import list_literature, list_methods, list_usable, show_method
from node.config import NodeConfig, load_config
from node.hosting.models import trainer_spec
from node.methods.choices import ADVANTAGES, KNOWN, chosen
from node.methods.importance_weights import IMPORTANCE_WEIGHTS
from node.methods.loss_settings import CORRECTIONS, LOSSES
from node.methods.losses import OBJECTIVES
from node.methods.registry import (
    LITERATURE,
    METHODS,
    families,
    named,
)
from node.stages.table import STAGES
from swarm.errors import ConfigError

MORE_TESTS = Path(__file__).parent / "test_training_corrections.py"


def said(name: str | None = None) -> list[str]:
    lines: list[str] = []
    if name is None:
        list_methods(lines.append)
    else:
        show_method(name, lines.append)
    return lines


def test_what_loops_take_and_what_is_listed_is_the_same() -> None:
    listed = {f: {m.name for m in methods} for f, methods in families().items()}
    assert listed["advantage"] == set(KNOWN["advantage"]) >= set(ADVANTAGES)
    assert listed["loss"] == set(LOSSES) == set(OBJECTIVES)
    assert listed["correction"] == set(CORRECTIONS) == set(IMPORTANCE_WEIGHTS)
    assert listed["control"] == set(KNOWN["control"])
    assert listed["generate"] == set(KNOWN["generate"])
    assert listed["replay"] == set(KNOWN["replay"])
    assert listed["draw"] == {"need"}
    assert listed["external_rule"] == {"adaptive_external"}
    assert listed["filter"] == set(KNOWN["filter"])
    assert listed["reward"] == set(KNOWN["reward"])


def test_every_method_says_what_it_is_and_where_it_is_from() -> None:
    assert len({(each.family, each.name) for each in METHODS}) == len(METHODS)
    for each in METHODS:
        assert each.about.endswith(".")
        assert each.source
        assert {field.name for field in fields(each.parameters())} == each.defaults.keys()


def test_the_list_and_one_of_it() -> None:
    lines = said()
    for each in METHODS:
        assert any(each.name in line.replace(",", "").split() for line in lines)
    one = said("cispo")
    assert one[0] == "loss cispo (arXiv 2506.13585)"
    assert "  ratio_max = 5.0" in one
    assert "  needs: behaviour" in one
    assert len([line for line in said("grpo") if not line.startswith(" ")]) == 2  # of each family
    assert any("--external-rule 'adaptive_external, " in line for line in said("adaptive_external"))
    assert said("admission")[-1].startswith("  swarm-node learn --control 'admission, ")
    with pytest.raises(ConfigError, match=r"method gpro: no such method; did you mean gspo\?"):
        show_method("gpro", print)


def test_every_row_of_the_literature_is_here_or_says_why_not() -> None:
    names = {each.name for each in METHODS}
    for row in LITERATURE:
        assert set(row.methods) <= names
        assert bool(row.methods or row.where) is not bool(row.why_not), row.name
        for part in row.where.split(", "):
            assert "/" not in part or Path(part).exists(), row.name
    assert len({row.name for row in LITERATURE}) == len(LITERATURE) >= 58
    lines: list[str] = []
    list_literature(lines.append)
    assert len(lines) == len(LITERATURE)
    row = (
        "BAPO (2510.18927): bapo (loss; node.methods.losses._bapo; torch, vllm, openai, scripted; "
        "node, learner; test_training_objectives.py, test_stages_loss.py)"
    )
    assert row in lines
    (spec,) = [line for line in lines if line.startswith("SPEC-RL")]
    assert "speculative (generate; node.methods.generation.speculative; torch; node" in spec


def test_every_method_is_in_a_loop() -> None:
    by_name = ("advantage", "loss", "correction", "preference")
    alone = [m for m in METHODS if m.family not in by_name and m.parameters not in STAGES]
    assert alone == []
    formulas = [m for m in METHODS if m.family == "advantage" and m.name not in ADVANTAGES]
    assert all(each.parameters in STAGES for each in formulas)


def test_the_table_has_no_row_beyond_the_methods() -> None:
    path = Path("node/methods/registry.toml")
    rows = {family: set(its) for family, its in tomllib.loads(path.read_text()).items()}
    del rows["literature"]
    tests = {"function_test", "loop_test"}
    assert rows == {family: tests | set(its) for family, its in KNOWN.items()}


def test_every_method_has_its_two_tests_where_the_list_says() -> None:
    folder = Path(__file__).parent
    for each in METHODS:
        text = (folder / f"{each.function_test}.py").read_text()
        names = {each.name, each.function.__name__, type(each.parameters()).__name__}
        whole = each.family == "loss" and "OBJECTIVES.items()" in text
        assert whole or any(re.search(rf"\b{name}\b", text) for name in names), each.name
    untested = set()
    for each in METHODS:
        text = (folder / f"{each.loop_test}.py").read_text()
        all_of = "sorted(set(LOSSES" if each.family == "loss" else "CORRECTIONS)"
        names = (f'"{each.name}', type(each.parameters()).__name__)
        whole = each.family in ("loss", "correction") and all_of in text
        if not whole and not any(name in text for name in names):
            untested.add(each.name)
    assert untested == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2510.21830", ["gapo"]),
        ("dr.grpo", ["dr_grpo"]),
        ("reinforce++", ["reinforce_pp"]),
        ("vcrl", ["variance_curriculum", "variance"]),
        ("siri", ["length_schedule"]),
        ("d3s", ["extremes"]),
        ("dart", ["truncated", "pool_of_successes"]),
        ("latr", ["branching"]),
        ("lens", ["purify"]),
        ("arrol", ["pruning"]),
        ("aqn", ["noise"]),
        ("ttrl", ["majority"]),
        ("poise", ["cross_value"]),
        ("fapo", ["flawed"]),
        ("scope", ["salvage"]),
        ("rlep", ["replayed_successes"]),
        ("sapo", ["sapo"]),
        ("2511.20347", ["soft_gate"]),
        ("2503.14476", ["dapo", "zero_advantage", "dynamic_sampling", "overlong"]),
        ("gpro", []),
    ],
)
def test_other_names(text: str, expected: list[str]) -> None:
    assert [each.name for each in named(text)] == expected


def test_an_ambiguous_name_lists_its_methods() -> None:
    known = {each.name: each.parameters for each in METHODS if each.family == "filter"}
    told = "a name of several; take one of zero_advantage, dynamic_sampling, overlong"
    with pytest.raises(ValueError, match=told):
        chosen(known, "2503.14476")
    assert str(chosen(known, "d3s")) == "extremes"


def test_two_methods_are_called_sapo() -> None:
    assert any("TRL's `sapo` is `soft_gate`" in line for line in said("sapo"))
    assert any("TRL's `sapo`" in line for line in said("soft_gate"))


def test_every_method_has_a_test_that_names_it() -> None:
    here = Path(__file__).parent
    tests = [*here.glob("test_methods_*.py"), *here.glob("test_stages_*.py"), MORE_TESTS]
    text = "".join(each.read_text() for each in tests)
    for each in METHODS:
        function = each.function.__name__
        assert each.name in text or function in text, each.name


def test_the_command_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "rloo"]) == 0
    assert "advantage rloo" in capsys.readouterr().out


def test_what_a_node_of_a_run_may_use_and_why_not(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    head = 'name = "r"\n[[environments]]\nname = "scripted_sum"\n'

    def usable(text: str, **given: str) -> list[str]:
        run.write_text(head + text)
        lines: list[str] = []
        list_usable(lines.append, given, {}, run)
        return lines

    plain = usable("")
    unconditional = "variance_curriculum, length_schedule, dars, brorl, xrpo_allocation"
    assert f"control, run r, engine torch: {unconditional}" in plain
    assert any(
        line.startswith("  not vade: --control vade: vade: run r has no tasks") for line in plain
    )
    assert any("not speculative" in line and "common.share" in line for line in plain)
    assert any(line.startswith("loss, run r, engine torch: sapo, grpo") for line in plain)
    assert "external_rule, run r, engine torch: adaptive_external" in plain
    common = usable("[common]\nshare = 0.5\n")
    assert f"control, run r, engine torch: cdas, vade, {unconditional}, duet" in common
    assert "generate, run r, engine torch: " + ", ".join(KNOWN["generate"]) in common
    other = usable("[common]\nshare = 0.5\n", engine="vllm")
    assert "generate, run r, engine vllm: purify, hints, nudges" in other
    assert any("not speculative" in line and "has no drafts" in line for line in other)
    corrected = usable('[training]\nloss = "tis"\n')
    assert "correction, run r, engine torch: none" in corrected
    assert any("is for the loss sapo, and tis has its" in line for line in corrected)
    with pytest.raises(ConfigError, match="engine"):
        usable("", engine="abacus")


def test_a_nodes_methods_are_its_own_and_no_rule_of_the_run() -> None:
    plain = load_config({}, {})
    other = load_config({"advantage": "rloo", "loss": "cispo, ratio_max=4"}, {})
    assert other.run.run_id == plain.run.run_id
    assert (str(other.advantage), str(other.loss)) == ("rloo", "cispo, ratio_max=4.0")
    assert trainer_spec(other, "m").loss == "cispo, ratio_max=4.0"
    assert trainer_spec(other, "m", is_learner=True).loss == "cispo, ratio_max=4.0"
    weighed = load_config({"correction": "icepop, weight_max=4"}, {})
    for is_learner in (False, True):
        spec = trainer_spec(weighed, "m", is_learner=is_learner)
        assert (spec.loss, spec.correction) == ("sapo", "icepop, weight_max=4.0")
    with pytest.raises(ConfigError, match="correction veto: is for the loss sapo, and tis has its"):
        trainer_spec(load_config({"correction": "veto", "loss": "tis"}, {}), "m")
    table = NodeConfig.model_validate({"run": plain.run, "loss": {"kind": "topr"}})
    assert str(table.loss) == "topr"
    with pytest.raises(ConfigError, match=r"--loss cispo, ratio_max=0: cispo: ratio_max: Input"):
        load_config({"loss": "cispo, ratio_max=0"}, {})
    with pytest.raises(ConfigError, match=r"--advantage ppo: no such method; take one of grpo"):
        load_config({"advantage": "ppo"}, {})
