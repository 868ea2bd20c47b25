"""Advantages against worked examples, limiting cases, and slow definitions of their own."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.methods import advantages as formulas
from node.methods import rewards
from node.methods.choices import ADVANTAGES, KNOWN, advantages, chosen
from node.methods.groups import by_source, lengths, mean_logprobs
from node.methods.method import MethodSettings
from swarm.rollouts import Completion, FinishReason, ScoredGroup
from tests.scored_groups import of_completions, scored

TWO_OF_EIGHT = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def view(*values: float, **more: Any) -> ScoredGroup:
    more.setdefault("lengths", tuple(range(1, len(values) + 1)))
    return scored(values, **more)


def of(name: str, *groups: ScoredGroup, **parameters: Any) -> list[tuple[float | None, ...]]:
    return advantages(groups, ADVANTAGES[name][0](**parameters))


def close(found: tuple[float | None, ...], wanted: tuple[float | None, ...]) -> bool:
    return len(found) == len(wanted) and all(
        a is b if a is None or b is None else math.isclose(a, b, abs_tol=1e-4)
        for a, b in zip(found, wanted, strict=True)
    )


# --- worked examples ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("grpo", 1.6202, -0.5401),
        ("dr_grpo", 0.75, -0.25),
        ("rloo", 0.8571, -0.2857),
        ("gapo", 1.8708, 0.0),  # the majority is the baseline
    ],
)
def test_two_of_eight(name: str, right: float, wrong: float) -> None:
    (found,) = of(name, view(*TWO_OF_EIGHT))
    assert close(found, tuple(right if each else wrong for each in TWO_OF_EIGHT))


def test_opo_weighs_rewards_by_length() -> None:
    (found,) = of("opo", view(1, 0, 0, lengths=(10, 20, 20)))
    assert close(found, (0.8, -0.2, -0.2))


def test_pass_k_rewards_the_lead_of_the_best() -> None:
    assert of("pass_k", view(0.25, 1.0, 0.5)) == [(0.0, 0.5, 0.0)]
    assert of("pass_k", view(1.0, 1.0, 0.0)) == [(0.0, 0.0, 0.0)]
    (found,) = of("pass_k", view(1.0, 0.0), over_std=True)
    assert close(found, (math.sqrt(2), 0.0))


def test_mc_grpo_leaves_one_median_out() -> None:
    (found,) = of("mc_grpo", view(1, 0, 0, 0, 0), scale="none")
    assert found == (1.0, None, 0.0, 0.0, 0.0)
    (found,) = of("mc_grpo", view(1, 0, 0, 0, 0), scale="mad")
    assert found[0] == 5.0  # a thousand, but for the bound
    (found,) = of("mc_grpo", view(1, 0, 0, 0, 0), scale="mad", advantage_max=1e9)
    assert close(found[:1], (1000.0,))
    (found,) = of("mc_grpo", view(0.1, 0.5, 0.9, 0.6), scale="none")
    assert close(found, (-0.4, None, 0.4, 0.1))  # of an even number, the lower of the middle two


def test_gapo_takes_the_lowest_of_equally_dense_windows() -> None:
    (found,) = of("gapo", view(*[0.0] * 4, *[1.0] * 4))
    assert close(found, (0.0,) * 4 + (1.3229,) * 4)


@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0, 10.0], ids=str)
def test_rounding_decides_no_tie_of_gapo(scale: float) -> None:
    """Shares of tests are evenly spaced: all windows are equally dense."""
    (found,) = of("gapo", view(*(scale * each for each in range(4))))
    wanted = of("gapo", view(0, 1, 2, 3))[0]
    assert close(found, wanted)
    assert wanted[1] is not None
    assert wanted[1] > 0.0


def test_whitening_is_over_each_sources_groups() -> None:
    groups = (view(1, 0), view(0.6, 0.4), view(1, 1), view(1, 0, 0, 0, source="peer"))
    found = of("reinforce_pp", *groups)
    values = [0.5, -0.5, 0.1, -0.1]
    scale = math.sqrt(sum(v * v for v in values) / 3)
    assert close(found[0], (0.5 / scale, -0.5 / scale))
    assert close(found[1], (0.1 / scale, -0.1 / scale))
    assert found[2] == (0.0, 0.0)
    louder = replace(groups[3], rewards=(900.0, 0.0, -900.0, 3.0))
    assert of("reinforce_pp", *groups[:3], louder)[:3] == found[:3]
    assert by_source(groups) == {"": [0, 1, 2], "peer": [3]}


def test_contexts_share_a_part_of_the_gap_between_them() -> None:
    hinted = view(1, 1, 0, 0, 1, 0, contexts=("a", "a", "b", "b", "b", ""))
    raw = [
        (1 - 1) + 1.1 * (1 - 0.5),
        (1 - 1) + 1.1 * (1 - 0.5),
        (0 - 1 / 3) + 1.1 * (1 / 3 - 0.5),
        (0 - 1 / 3) + 1.1 * (1 / 3 - 0.5),
        (1 - 1 / 3) + 1.1 * (1 / 3 - 0.5),
        0 - 0.5,
    ]
    mean = fmean(raw)
    scale = math.sqrt(fmean([(each - mean) ** 2 for each in raw])) + 1e-5
    assert close(of("contexts", hinted)[0], tuple((each - mean) / scale for each in raw))


def test_sources_of_one_task_have_baselines_of_their_own() -> None:
    ours, theirs = view(0, 0, 0, 1, prompt="p"), view(1, 1, 1, 0, prompt="p", source="peer")
    own, foreign = of("contexts", ours, theirs, between=0.0)
    assert own == of("contexts", ours, theirs, between=0.0)[0]
    assert own[3] is not None
    assert own[3] > 0 > own[0]
    assert foreign[0] is not None
    assert foreign[3] is not None
    assert foreign[0] > 0 > foreign[3]
    alone = of("contexts", ours)[0]
    grpo = of("grpo", ours)[0]
    assert close(alone, tuple(value * math.sqrt(4 / 3) for value in grpo if value is not None))


def test_novelty_lifts_unlikely_right_ones_up_to_a_share() -> None:
    logs = (-1.0, -3.0, -1.0, -1.0)
    (plain,), (found,) = (
        of("grpo", view(1, 1, 0, 0)),
        of("novelty", view(1, 1, 0, 0, logprobs=logs)),
    )
    assert plain[1] is not None
    assert found[0] == plain[0]  # likelier than its group
    assert close(found[1:2], (1.5 * plain[1],))
    assert found[2:] == plain[2:]
    assert of("novelty", view(1, 1, 0, 0, logprobs=(math.nan,) * 4)) == [plain]
    assert of("novelty", view(1, 1, 0, 0)) == [plain]


def test_uniqueness_halves_what_two_say() -> None:
    texts = ("4  apples", "4 apples", "four", "5")
    (plain,), (found,) = (
        of("grpo", view(1, 1, 1, 0)),
        of("uniqueness", view(1, 1, 1, 0, texts=texts)),
    )
    assert plain[0] is not None
    assert close(found, (plain[0] / 2, plain[0] / 2, plain[2], plain[3]))


def test_turns_are_measured_by_others_at_their_place() -> None:
    assert formulas.discounted([1, 1, 0, 1], [True, True, False, True], 0.5) == (1.5, 1.0, 0.0, 1.0)
    found = formulas.two_levels(
        [[1.0, 1.0], [0.0]], [[True, True], [False]], formulas.TwoLevels(discount=0.5)
    )
    # transcripts: 1 - 2/3 and 0 - 2/3; first turns 1.5 and 0 about 0.75; the second turn is alone
    assert close(found[0], (1 / 3 + 0.75, 1 / 3))
    assert close(found[1], (-2 / 3 - 0.75,))
    assert formulas.two_levels([], [], formulas.TwoLevels()) == []


def test_a_part_counts_while_all_before_it_are_right() -> None:
    found = formulas.sub_problems(
        [[True, False, True], [True, True, False], [False, True, True]],
        formulas.SubProblems(over_std=False),
    )
    assert close(found[0], (1 / 3, -1 / 3, 0.0))
    assert close(found[1], (1 / 3, 2 / 3, 0.0))
    assert close(found[2], (-2 / 3, -1 / 3, 0.0))
    with pytest.raises(ValueError, match="unlike numbers of parts"):
        formulas.sub_problems([[True], [True, False]], formulas.SubProblems())


def test_a_vote_is_a_peers_and_not_a_completions() -> None:
    answers = ["7", "8", "8", "8", None]
    one_each = rewards.majority(answers, ["a", "b", "c", "d", "e"], rewards.Majority())
    assert one_each == (0.0, 1.0, 1.0, 1.0, 0.0)
    flood = rewards.majority(
        ["7", "7", "8", "8", "8"], ["a", "b", "c", "c", "c"], rewards.Majority()
    )
    assert flood == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert rewards.majority([None, None], ["a", "b"], rewards.Majority()) == (0.0, 0.0)
    for count in range(1, 12):  # shares of a vote add up to one but for rounding
        said, by = ["5"] * count + ["7"], ["a"] * count + ["b"]
        assert rewards.majority(said, by, rewards.Majority()) == (*(1.0,) * count, 0.0)


def test_certain_answers_get_more_and_rare_ones_are_dropped() -> None:
    set_to = rewards.Distribution(bonus=0.0)
    found = rewards.distribution(["7", "7", "8"], [0.5, 0.5, 0.25], "abc", set_to)
    assert close(found, (0.5, 0.5, 0.5))  # 2/3 / 0.5 is 1/3 / 0.25
    dropped = rewards.distribution(
        ["7", "7", "8"], [0.5, 0.5, 0.5], "abc", rewards.Distribution(share_min=0.4, bonus=0.0)
    )
    assert close(dropped, (1.0, 1.0, 0.0))
    with_bonus = rewards.distribution(["7", "8"], [0.5, 0.5], "ab", rewards.Distribution(bonus=0.1))
    assert close(with_bonus, (0.525, 0.525))


def test_flawed_right_answers_and_cross_baselines() -> None:
    assert rewards.flawed([True, True, False], [False, True, True], rewards.Flawed()) == (1, 0, -1)
    assert close(rewards.cross_value((1.0, 0.0), (0.9, 0.25)), (0.75, -0.9))
    assert rewards.cross_value((1.0, 0.0), (7.0, -7.0)) == (1.0, -1.0)


def hacpo(
    *groups: ScoredGroup, capability: dict[str, float], **parameters: Any
) -> list[tuple[float | None, ...]]:
    return formulas.hacpo(groups, formulas.Hacpo(**parameters), capability)


def test_hacpo_measures_by_how_able_each_source_is() -> None:
    own = view(1, 1, 0, 1, prompt="a")
    peer = view(1, 0, 0, 0, prompt="a", source="peer")
    stronger, weaker = (
        hacpo(own, peer, capability={"": able, "peer": 0.9 - able}) for able in (0.6, 0.3)
    )
    # mu = (3 + 2 x 1) / 8, and the peer's count half
    assert close(stronger[0], (0.7016, 0.7016, -1.1693, 0.7016))
    assert close(stronger[1], (0.3508, -0.58465, -0.58465, -0.58465))
    # the other way round: mu = (3 + 1 / 2 ) / 8 = .4375, and the peer's count twice
    scale = 0.53452 + 1e-6
    assert close(weaker[0], tuple((r - 0.4375) / scale for r in own.rewards))
    assert close(weaker[1], tuple(2 * (r - 0.4375) / scale for r in peer.rewards))
    swapped = hacpo(
        view(*own.rewards, prompt="a", source="peer"),
        view(*peer.rewards, prompt="a"),
        capability={"": 0.3, "peer": 0.6},
    )
    assert close(swapped[1], (1.2862, -0.5846, -0.5846, -0.5846))
    assert close(swapped[0], (2.5724, 2.5724, -1.1693, 2.5724))


def test_hacpos_guards_and_what_the_paper_leaves_open() -> None:
    own = view(1, 1, 0, 1, prompt="a")
    peer = view(1, 0, 0, 0, prompt="a", source="peer")
    far = hacpo(own, peer, capability={"": 0.9, "peer": 0.1})
    scale = 0.53452 + 1e-6  # mu = (3 + 9) / 8 is above 1: the mean of own rewards, .75
    assert close(far[0], tuple((r - 0.75) / scale for r in own.rewards))
    assert close(far[1], tuple((r - 0.75) / scale / 9 for r in peer.rewards))
    bounded = hacpo(own, peer, capability={"": 1.0, "peer": 0.0}, weight_max=2)
    assert close(bounded[0], (0.7016, 0.7016, -1.1693, 0.7016))
    equal = view(1, 1, prompt="a"), view(1, 1, prompt="a", source="peer")
    assert hacpo(*equal, capability={"": 0.9, "peer": 0.1}) == [(0.0, 0.0), (0.0, 0.0)]
    alone = view(1, 0, 0, 1)
    assert hacpo(alone, capability={"": 0.5}) == of("grpo", alone)
    elsewhere = replace(peer, prompt="b")
    (_, found), (grpo,) = hacpo(own, elsewhere, capability={"": 0.6, "peer": 0.3}), of("grpo", peer)
    assert close(found, tuple(None if each is None else each / 2 for each in grpo))
    assert hacpo(own, peer, capability={}) == hacpo(own, peer, capability={"": 0.5, "peer": 0.5})


# --- limiting cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nothing_is_learned_of_equal_rewards_or_of_one(name: str) -> None:
    groups = [view(1, 1, 1, 1), view(0.3, 0.3 + 1e-12, 0.3), view(1)]
    assert of(name, *groups) == [(0.0,) * 4, (0.0,) * 3, (0.0,)]
    assert of(name) == []


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_rewards_that_are_no_numbers_are_named(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match="not all are finite"):
        of(name, view(1, wrong, 0))


GROUPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=8),
        st.sampled_from(["", "peer", "other"]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(drawn=GROUPS)
def test_a_batch_in_another_order_is_worth_the_same(
    name: str, drawn: list[tuple[list[float], str]]
) -> None:
    groups = [view(*values, source=source) for values, source in drawn]
    found = of(name, *groups)
    assert all(close(a, b) for a, b in zip(of(name, *groups[::-1]), found[::-1], strict=True))
    for each, values in zip(found, groups, strict=True):
        assert len(each) == len(values.rewards)
        assert all(value is None or math.isfinite(value) for value in each)


# --- slow definitions of their own ----------------------------------------------------------------


def slow_rloo(values: list[Fraction]) -> list[Fraction]:
    return [
        value - sum(values[:at] + values[at + 1 :]) / (len(values) - 1)
        for at, value in enumerate(values)
    ]


def slow_gapo_base(values: list[Fraction]) -> Fraction:
    ordered = sorted(values)
    size = -(-len(ordered) // 2)
    windows = [ordered[at : at + size] for at in range(len(ordered) - size + 1)]
    window = min(windows, key=lambda each: (each[-1] - each[0], each[0]))
    middle = len(window) // 2
    return window[middle] if len(window) % 2 else (window[middle - 1] + window[middle]) / 2


SLOW: dict[str, Callable[[list[Fraction]], list[Fraction]]] = {
    "rloo": slow_rloo,
    "dr_grpo": lambda values: [value - sum(values) / len(values) for value in values],
}


@given(st.lists(st.fractions(0, 1, max_denominator=8), min_size=2, max_size=9))
def test_against_fractions(values: list[Fraction]) -> None:
    if max(values) == min(values):
        return
    group_view = view(*map(float, values))
    for name, slow in SLOW.items():
        assert close(of(name, group_view)[0], tuple(map(float, slow(values))))
    base = slow_gapo_base(values)
    squares = sum((value - base) ** 2 for value in values) / (len(values) - 1)
    spread = math.sqrt(squares) + formulas.STD_EPSILON
    wanted = tuple(float(value - base) / spread for value in values)
    assert close(of("gapo", group_view)[0], wanted)


# --- by name --------------------------------------------------------------------------------------


def test_a_method_is_chosen_by_text_or_table_and_says_itself_again() -> None:
    for text in ("rloo", "gapo, window_share=0.4", "mc_grpo, scale=mad, advantage_max=3.0"):
        made = chosen(KNOWN["advantage"], text)
        assert isinstance(made, MethodSettings)
        assert (str(made), chosen(KNOWN["advantage"], str(made))) == (text, made)
    assert chosen(KNOWN["advantage"], {"kind": "gapo", "window_share": 0.4}) == formulas.Gapo(
        window_share=0.4
    )
    assert {name: made.name for name, made in of_names().items()} == {n: n for n in ADVANTAGES}


def of_names() -> dict[str, Any]:
    from node.methods.registry import METHODS

    return {each.name: each for each in METHODS if each.name in ADVANTAGES}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nope", "no such method; take one of grpo"),
        ("gapo, window_share=2", "gapo: window_share: Input should be less than or equal to 1"),
        ("gapo, x=1", "gapo takes no x; it takes window_share"),
        ("rloo, x=1", "rloo takes no x; it takes nothing"),
        ({"kind": 3}, "no such method"),
    ],
)
def test_what_is_no_method_is_said_in_a_line(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        chosen(KNOWN["advantage"], value)


def test_lengths_and_mean_log_probs_of_groups_with_and_without_tokens() -> None:
    made = Completion("abc", (1, 2), (-1.0, -3.0), FinishReason.STOP, 0)
    bare = Completion("abcd", (), (), FinishReason.STOP, 0)
    whole = of_completions([made, made], [1, 0], "p")
    assert (lengths(whole), mean_logprobs(whole), whole.source) == ((2, 2), (-2.0, -2.0), "")
    mixed = of_completions([made, bare], [1, 0], "p", "peer")
    assert (lengths(mixed), mean_logprobs(mixed), mixed.source) == ((3, 4), (), "peer")
    assert formulas.BARE == ""
    assert formulas.PASSED == 1.0
