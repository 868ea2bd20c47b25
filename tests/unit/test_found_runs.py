"""What is said of runs that peers tell of: nothing of it is believed, and nothing imported."""

import json
from typing import Any

import pytest

from node.commands import doctor
from node.commands.doctor import FoundRun, described
from node.config import load_run
from swarm.identity import Identity

NODE = Identity(b"n" * 32).peer_id
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{NODE}"


def found(rules: Any, **changes: Any) -> FoundRun:
    run = FoundRun(
        "sums-0123456789abcdef0123456789abcdef", ADDRESS, "swarm-node/0.1.0", {}, {NODE}, rules
    )
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def test_a_run_is_described_and_joined_by_its_last_line() -> None:
    rules = json.loads(load_run("sums", {})[0].as_json())
    lines = described(found(rules, packages={"reasoning-gym": "0.1.24", "nowhere": "2"}))
    assert lines[0] == "sums-0123456789abcdef0123456789abcdef: 1 node, swarm-node/0.1.0"
    assert "  tasks: chain_sum, products" in lines
    assert "  completions: up to 16 tokens" in lines
    assert "  model: any: each node trains its own" in lines
    (needs,) = [line for line in lines if line.startswith("  needs: ")]
    assert "reasoning-gym 0.1.24 (here is 0.1" in needs
    assert "nowhere 2 (not installed here)" in needs
    assert lines[-1] == f"  swarm-node join {ADDRESS}/run/sums-0123456789abcdef0123456789abcdef"


def test_a_learner_and_what_is_not_here_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("importlib.import_module", imported)
    rules = {
        "environments": [{"name": "theirs"}, {"name": "python_function"}, {"name": "theirs"}],
        "learner": {"model": "Qwen/Qwen2.5-0.5B"},
    }
    text = "\n".join(described(found(rules)))
    assert "tasks: theirs, python_function\n" in text
    assert "Qwen/Qwen2.5-0.5B, which a central learner trains" in text
    assert "the environment theirs (not here)" in text
    assert "a sandbox (" in text


@pytest.mark.parametrize(
    "rules",
    [
        None,
        {},
        {"environments": 7, "sampling": [], "models": None},
        {"models": 7},
        {
            "environments": [7, {}, {"name": ["x"]}],
            "learner": 3,
            "sampling": {"max_new_tokens": {}},
        },
        {"environments": [{"name": "\x1b[2Jx" * 999}], "models": ["\n" * 999] * 999},
    ],
)
def test_rules_of_any_form_are_some_short_lines_of_text(rules: Any) -> None:
    lines = described(found(rules, release="\x1b[2J", packages={"\n": "\n"}))
    assert all(line.isprintable() for line in lines)
    assert all(len(line) < 700 for line in lines)
    assert len(lines) <= 6


@pytest.mark.parametrize(
    "run_id",
    [
        "x",
        "-x-0123456789abcdef0123456789abcdef",
        "x; reboot #-0123456789abcdef0123456789abcdef",
        "$(reboot)-0123456789abcdef0123456789abcdef",
        "a\nb-0123456789abcdef0123456789abcdef",
        "\x1b" * 9,
    ],
)
def test_an_id_that_is_none_is_in_no_line_to_paste(run_id: str) -> None:
    lines = described(found({}, run_id=run_id))
    assert all(line.isprintable() for line in lines)
    assert not any("swarm-node join" in line for line in lines)
    assert lines[-1] == "  no run has such an id: nothing joins it"


@pytest.mark.parametrize("rules", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_are_no_rules_is_none(rules: bytes) -> None:
    assert doctor._table(rules) is None
