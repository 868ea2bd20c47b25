"""Micro-batches: little of them is padding, and they hold the same rows."""

from collections.abc import Sequence
from random import Random

import pytest

from node.train import rows as packing
from node.train.rows import Row, Unit, levels, pack, padded_tokens, pieces

MANY = 2**20  # tokens: one micro-batch holds all


def unit(prompt: int, *lengths: int) -> Unit:
    return Unit([1] * prompt, [Row([2] * length, 1.0, own=True) for length in lengths])


def skewed() -> list[Unit]:
    """Groups as language models make them: most answers short, and one in eight runs on."""
    rng = Random(7)
    return [
        unit(
            rng.randrange(60, 80),
            *(rng.randrange(20, 60) for _ in range(7)),
            rng.randrange(300, 600),
        )
        for _ in range(16)
    ]


def computed(batches: Sequence[Sequence[Unit]], *, grid: bool = False) -> int:
    """Positions that run through the model."""
    total = 0
    for batch in batches:
        rows = [row for each in batch for row in each.rows]
        cells = len(batch) * max(len(each.rows) for each in batch) if grid else len(rows)
        total += len(batch) * max(len(each.prompt) for each in batch)
        total += cells * max(len(row.tokens) for row in rows)
    return total


def wasted(
    units: Sequence[Unit], batches: Sequence[Sequence[Unit]], *, grid: bool = False
) -> float:
    """The share of them that is padding, or a prompt once more."""
    needed = sum(len(u.prompt) + sum(len(row.tokens) for row in u.rows) for u in units)
    return 1 - needed / computed(batches, grid=grid)


def by_prompt_alone(units: Sequence[Unit], tokens_max: int) -> list[list[Unit]]:
    """How micro-batches were packed before completions' lengths counted."""
    found: list[list[Unit]] = [[]]
    for each in sorted(units, key=lambda each: len(each.prompt)):
        for piece in pieces(each, tokens_max):
            if found[-1] and padded_tokens([*found[-1], piece]) > tokens_max:
                found.append([])
            found[-1].append(piece)
    return found


def rows_of(units: Sequence[Unit]) -> list[int]:
    return sorted(id(row) for each in units for row in each.rows)


@pytest.mark.parametrize("tokens_max", [16_384, MANY])
def test_little_is_padded_where_completions_are_of_unlike_lengths(tokens_max):
    units = skewed()
    before = wasted(units, by_prompt_alone(units, tokens_max))
    after = wasted(units, list(pack(units, tokens_max)))
    assert before > 0.7
    assert after < 0.35
    kinds = [list(range(len(units)))]
    assert wasted(units, list(pack(units, tokens_max, kinds)), grid=True) < 0.35


def test_without_a_cut_by_length_most_would_be_padding(monkeypatch):
    """The planted fault: a pass that costs so much that none is made for it."""
    units = skewed()
    monkeypatch.setattr(packing, "PASS_TOKENS", MANY)
    assert wasted(units, list(pack(units, MANY))) > 0.6


@pytest.mark.parametrize("kinds", [None, [[0, 2, 4, 6], [1, 3, 5, 7, *range(8, 16)]]])
@pytest.mark.parametrize("tokens_max", [1, 700, 4096, MANY])
def test_every_row_is_there_once_and_what_is_packed_fits(kinds, tokens_max):
    units = skewed()
    batches = list(pack(units, tokens_max, kinds))
    assert rows_of([each for batch in batches for each in batch]) == rows_of(units)
    prompts = {id(row): each.prompt for each in units for row in each.rows}
    for batch in batches:
        assert all(prompts[id(row)] is each.prompt for each in batch for row in each.rows)
        alone = len(batch) == 1 and len(batch[0].rows) == 1
        assert alone or padded_tokens(batch) <= tokens_max
    if kinds:
        of = {id(row): place for place, each in enumerate(units) for row in each.rows}
        for batch in batches:
            met = {of[id(row)] for each in batch for row in each.rows}
            assert any(met <= set(kind) for kind in kinds)


def test_alike_lengths_stay_in_one_pass():
    units = [unit(40, 30, 34, 38), unit(44, 30, 31, 40)]
    [batch] = pack(units, MANY)
    assert rows_of(batch) == rows_of(units)
    assert list(pack([], MANY)) == []


def test_unlike_prompts_go_apart_where_that_saves_more_than_a_pass():
    near, far = unit(20, *[10] * 8), unit(1500, *[10] * 8)
    assert [len(batch) for batch in pack([far, near], MANY)] == [1, 1]
    assert [len(batch) for batch in pack([unit(60, *[10] * 8), near], MANY)] == [2]


def test_a_grid_counts_the_room_that_it_leaves_empty():
    """One prompt has eight long rows, the others one: in a grid all would have room for eight."""
    units = [unit(20, *[500] * 8), *(unit(20, 500) for _ in range(7))]
    [batch] = pack(units, MANY)
    assert len(batch) == 8
    apart = list(pack(units, MANY, [list(range(8))]))
    assert sorted(len(batch) for batch in apart) == [1, 7]


def test_where_lengths_are_cut_is_the_cheapest_of_all_ways():
    """Against every way to cut five lengths."""
    units = [unit(30, 5, 5, 90, 200, 700, 710), unit(50, 5, 80, 220)]
    lengths = sorted({len(row.tokens) for each in units for row in each.rows})

    def cost(groups: list[list[Unit]]) -> int:
        return (
            computed(groups)
            - sum(
                len(g) * max(len(u.prompt) for u in g) - sum(len(u.prompt) for u in g)
                for g in groups
            )
            + packing.PASS_TOKENS * len(groups)
        )

    def ways(above: int, rest: list[int]) -> list[list[list[Unit]]]:
        if not rest:
            return [[]]
        return [
            [packing._between(units, above, rest[n]), *others]
            for n in range(len(rest))
            for others in ways(rest[n], rest[n + 1 :])
        ]

    found = levels(units, is_grid=False)
    assert cost(found) == min(map(cost, ways(0, lengths)))
    assert 1 < len(found) < len(lengths)
