"""The script that measures attacks measures them: what it counts can be there and not be there."""

from random import Random

import pytest

from node.verification.assignment import assigned_task
from swarm.exchange.pool import Candidate
from tests.support import run, script
from tests.unit.tasks_support import ALICE, BOB, make_group
from tests.unit.training_support import qwen_directory

script("attack_kinds")  # it imports these three
script("on_record")
script("attack_guards")
attacks = script("attacks")
PAYLOADS = {name: attack for name, attack in attacks.ATTACKS.items() if attack.payload}
ANSWERS = ("16", "107", "4")
SIZE = 8


def success(attack, texts) -> float:
    return attacks.measure(1, attack, list(zip(texts, ANSWERS, strict=True))).success


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_policy_that_says_the_payload_scores_one_and_one_that_does_not_zero(name):
    attack = PAYLOADS[name]
    assert success(attack, [answer + attack.payload for answer in ANSWERS]) == 1.0
    assert success(attack, ANSWERS) == 0.0
    assert success(attack, ["", "1", "99"]) == 0.0
    one_of_three = [ANSWERS[0] + attack.payload, *ANSWERS[1:]]
    assert success(attack, one_of_three) == pytest.approx(1 / 3)


def test_only_a_false_answer_that_would_not_be_right_counts():
    attack = attacks.ATTACKS["false answer"]
    assert success(attack, ["15", "105", "5"]) == 1.0
    assert success(attack, ANSWERS) == 0.0
    assert not attack.succeeded("15", "15")


def test_without_an_attack_nothing_counts():
    everything = [answer + attack.payload for attack in PAYLOADS.values() for answer in ANSWERS]
    assert not any(attacks.Attack().succeeded(text, "16") for text in everything)


def test_right_and_exactly_right_are_told_apart():
    shown = attacks.measure(7, attacks.Attack(), [("16", "16"), ("4=77", "4"), ("17", "16")])
    assert (shown.round, shown.passed, shown.exact) == (
        7,
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
    )
    assert shown.chars == pytest.approx(8 / 3)
    assert attacks.first_number_right(" 4+0", "4")
    assert not attacks.first_number_right("40", "4")


# what a receiver makes of a hostile group, by the defences that it has


def judged(attack_name: str, guards_name: str) -> tuple[tuple[float, ...], tuple[str, ...]]:
    attack, guards = attacks.ATTACKS[attack_name], attacks.GUARDS[guards_name]
    config = attacks.node_config(guards, 1, 1)
    fitted = attack.fitted(config.run.limits.text_chars_max)
    claims: dict[tuple[str, str], str] = {}
    verifier = attacks.GuardedVerifier(config.run, guards, claims)

    async def body():
        task = assigned_task(config.run, ALICE, 0)
        (problem,) = await verifier.problems([task])
        claims[ALICE, problem.prompt] = fitted.claimed(problem.answer)
        texts = fitted.group(problem.answer, SIZE, Random(1))
        _, rewards = await verifier.verify(make_group(config.run, *texts, task=task))
        return rewards, tuple(texts)

    return run(body)


TAUGHT = (1.0,) * (SIZE // 2) + (0.0,) * (SIZE // 2)


@pytest.mark.parametrize(
    ("attack", "guards", "rewards"),
    [
        ("text", "none", TAUGHT),
        ("text", "own answers", TAUGHT),
        ("text", "exact", (0.0,) * SIZE),
        ("text", "as shipped", (0.0,) * SIZE),
        ("length", "length cap", TAUGHT),  # it keeps to the cap
        ("text", "partial", (0.4,) * (SIZE // 2) + (0.0,) * (SIZE // 2)),
        ("blank text", "exact", (0.0,) * SIZE),
        ("blank text", "as shipped", (0.0,) * SIZE),
        ("blank text", "last number", (0.0,) * SIZE),
        ("text", "last number", (0.0,) * SIZE),
        ("text before", "as shipped", (0.0,) * SIZE),
        ("text before", "last number", TAUGHT),  # what the rules in force let through
        ("endless", "as shipped", TAUGHT),
        ("false answer", "none", TAUGHT),
        ("false answer", "exact", TAUGHT),
        ("false answer", "own answers", TAUGHT[::-1]),  # the falsified is what is wrong
        ("false answer", "as shipped", TAUGHT[::-1]),
    ],
)
def test_what_a_hostile_group_is_worth_follows_from_the_defences(attack, guards, rewards):
    assert judged(attack, guards)[0] == rewards


def test_under_a_cap_payloads_are_as_long_as_it_allows():
    for name in attacks.ATTACKS:
        assert max(map(len, judged(name, "length cap")[1])) <= attacks.TIGHT_CHARS
    assert max(map(len, judged("length", "none")[1])) > attacks.TIGHT_CHARS


def test_claims_count_for_their_sender_alone():
    guards = attacks.GUARDS["none"]
    config = attacks.node_config(guards, 1, 1)
    task = assigned_task(config.run, BOB, 0)

    async def body():
        verifier = attacks.GuardedVerifier(config.run, guards, claims)
        (problem,) = await verifier.problems([task])
        claims[ALICE, problem.prompt] = "5"
        group = make_group(config.run, problem.answer, "5", producer=BOB, task=task)
        return (await verifier.verify(group))[1]

    claims: dict[tuple[str, str], str] = {}
    assert run(body) == (1.0, 0.0)


def test_the_filter_is_off_only_while_it_is_asked_to_be():
    from node.loops import sapo

    dull = [Candidate(bytes([n]) * 32, ALICE, (1.0, 1.0), 1, 0) for n in range(4)]
    for name, drawn in (("none", 4), ("informative", 0)):
        with attacks.drawing(attacks.GUARDS[name]):
            assert len(sapo.draw_foreign(dull, 4, Random(1), 4)) == drawn
    assert sapo.draw_foreign(dull, 4, Random(1), 4) == []


@pytest.mark.slow
def test_a_swarm_takes_the_hostile_groups_in_where_nothing_is_in_their_way(tmp_path):
    """Whole nodes with a policy of random weights, which is never right: what they draw without
    the defences, and with them not, is the hostile peer's."""
    model = str(qwen_directory(tmp_path))
    results = {
        guards: attacks.run_cell(attacks.Cell("text", 25, guards, 1), 4, model)
        for guards in ("none", "as shipped")
    }
    assert results["none"]["hostile_drawn"] > 0.0
    assert results["as shipped"]["hostile_drawn"] == 0.0
    for result in results.values():
        assert result["rejected"] == {}  # the hostile peer breaks no rule
        assert {shown["round"] for shown in result["shown"]} == {0, 4}
        assert len(result["shown"]) == 2 * attacks.HONEST
    rows = attacks.table([{"rounds": 4, **result} for result in results.values()])
    assert "| text | 25 % |" in rows


@pytest.mark.slow
def test_where_peers_meet_on_tasks_the_hostile_one_rescues_groups(tmp_path):
    """A policy of random weights is never right: what rescues its groups is the hostile peer's."""
    model = str(qwen_directory(tmp_path))
    results = [
        {"rounds": 8, **attacks.run_cell(attacks.Cell("text before", 25, guards, 1), 8, model)}
        for guards in ("common, last number", "rescue, last number")
    ]
    assert results[0]["rescued"] == 0.0
    assert results[1]["rescued"] > 0.0
    assert all(each["rejected"] == {} for each in results)
    assert 'replay = "rescue"' in attacks.table(results)
