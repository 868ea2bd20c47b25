"""The experiment on methods: an arm that is cheaper in a round is no better for that alone."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from node.policies import tiny
from tests.support import script

on_record = script("on_record")
script("measuring")
policies = script("experiment_policies")


def examined(*points: tuple[int, int]) -> dict[str, Any]:
    """One node; (tokens, greedy answers right of ten). A token takes two seconds, and one sample
    of each task passes that is answered greedily."""
    return {
        "points": [
            {
                "node": 0, "round": at, "tokens": tokens, "seconds": 2 * tokens,
                "tasks": [[place < right, int(place < right)] for place in range(10)],
            }
            for at, (tokens, right) in enumerate(points)
        ],
        "acted": {},
    }  # fmt: skip


@pytest.mark.parametrize("axis", ["tokens", "seconds"])
@pytest.mark.parametrize("figure", ["greedy", "pass@8"])
def test_results_are_compared_where_the_one_that_used_less_ends(axis: str, figure: str) -> None:
    long = examined((0, 2), (100, 4), (200, 8))
    short = examined((0, 2), (150, 3))
    # At 150 tokens the long one is half-way from 4 to 8 of ten: 60 percent, and the short has 30.
    assert policies.ahead(long, short, axis, figure) == pytest.approx(30.0)
    assert policies.ahead(short, long, axis, figure) == pytest.approx(-30.0)
    assert policies.ahead(short, long, axis, "sampled") == pytest.approx(-30.0 / 8)


def test_a_table_has_paired_differences_and_the_interval_of_all_comparisons() -> None:
    told = [
        {"arm": arm, "seed": seed, **examined((0, 2), (100, right))}
        for seed, pair in enumerate([(4, 5), (5, 6), (3, 4)])
        for arm, right in zip(("default", "cdas"), pair, strict=True)
    ]
    lines = policies.table("methods", told, 1).splitlines()
    heads, first, other = ([cell.strip() for cell in lines[at].split("|")] for at in (2, 4, 5))
    assert heads[-2] == "PRIMARY, for 20 comparisons"
    assert (first[-2], other[-2]) == ("", "+10.0 ± 0.0")  # each seed: one of ten more
    assert other[heads.index("greedy at the end")] == "50.0 ± 24.8"  # 4.303 x 10 / sqrt(3)


def test_a_kind_takes_from_another_all_that_it_does_not_say() -> None:
    unlike, peers = policies.KINDS["peers_tokenizers"], policies.KINDS["peers"]
    assert unlike["arms"] == peers["arms"]
    assert unlike["nodes"] != peers["nodes"]
    assert unlike["rounds"] == peers["rounds"]


@pytest.mark.parametrize(
    "changed",
    [
        {"arm": "cdas"},
        {"seed": 2},
        {"rounds": 30},
        {"policies": ["other weights"]},
        {"learning_rate": 1e-4},
        {"samples": 4},
    ],
)
def test_what_decides_a_result_changes_its_key(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(learning_rate: float | None, samples: int, **facts: Any) -> str:
        monkeypatch.setitem(policies.PLAN["settings"], "learning_rate", learning_rate)
        monkeypatch.setattr(policies, "SAMPLES", samples)
        return str(on_record.key_of(policies.facts_of("methods", **facts), "scripts/docs"))

    usual = {"arm": "default", "seed": 1, "rounds": 60, "policies": ["weights"]}
    usual |= {"learning_rate": None, "samples": 8}
    assert key(**usual) == key(**usual)
    assert key(**usual | changed) != key(**usual)


@pytest.mark.parametrize(("given", "made"), [("old", 0), ("new", 1)])
def test_no_result_of_other_code_is_kept(
    given: str, made: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(policies, "key", lambda *_: "new")
    monkeypatch.setattr(policies, "run_one", lambda *_: {"arm": "default"})
    command = ["methods", "--one", "default", "--key", given, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["experiment_policies.py", *command])
    with nullcontext() if made else pytest.raises(SystemExit, match="the code changed"):
        policies.main()
    assert len(list(tmp_path.iterdir())) == made


def test_an_arm_that_settings_refuse_is_named_and_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policies.KINDS["methods"]["arms"], "none such", {"replay": "none such"})
    options = argparse.Namespace(kind="methods", arms=["default", "none such"], rounds=60)
    assert policies.allowed(options) == ["default"]
    assert "none such is left out" in capsys.readouterr().out


def test_the_other_tokenizer_has_other_tokens_and_says_the_same() -> None:
    made = [tiny.byte_tokenizer(), policies.merging(tiny.byte_tokenizer())]
    plain, other = (each("0 1 1\n1 0 é")["input_ids"] for each in made)
    assert len(other) == len(plain) - 3  # of ` 1` twice and ` 0`
    assert made[0].decode(plain, skip_special_tokens=True) == "0 1 1\n1 0 é"
    assert made[1].decode(other, skip_special_tokens=True) == "0 1 1\n1 0 é"
