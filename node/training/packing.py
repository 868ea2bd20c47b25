"""A batch cut into micro-batches, so that little is padded and each fits into memory.

Completions that are run together are padded to the longest of them, and prompts likewise. So rows
of unlike lengths go apart, though a prompt whose completions do is then run once for each part, and
each pass has a price of its own: lengths are cut where that is least in all.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from node.training.rows import Row, Unit, padded_tokens

PASS_TOKENS: Final = 256  # what a pass costs beside its tokens, in tokens
CUTS_MAX: Final = 32  # lengths at which rows may be cut apart
PROBE_ROWS_MAX: Final = 16
PROBE_TOKENS_MAX: Final = 8192  # of completions


def pack(
    units: Sequence[Unit], tokens_max: int, kinds: Sequence[Sequence[int]] | None = None
) -> Iterator[list[Unit]]:
    """Cut units into micro-batches of at most `tokens_max` padded tokens, where one row allows.

    A unit whose completions are of unlike lengths, or that is too large for one micro-batch, is
    split by rows. With `kinds`, sets of indices, only units of one set meet, in a grid in which
    each prompt has room for as many rows as the one that has most.
    """
    is_grid = kinds is not None
    for kind in kinds if kinds is not None else [range(len(units))]:
        for level in levels([units[index] for index in kind], is_grid=is_grid):
            yield from _filled(level, tokens_max, is_grid=is_grid)


def pieces(unit: Unit, tokens_max: int) -> Iterator[Unit]:
    """A unit in parts of so many padded tokens, where one row allows, the shortest rows first."""
    piece: list[Row] = []
    for row in sorted(unit.rows, key=lambda row: len(row.tokens)):
        if piece and padded_tokens([Unit(unit.prompt, [*piece, row])]) > tokens_max:
            yield Unit(unit.prompt, piece)
            piece = []
        piece.append(row)
    yield Unit(unit.prompt, piece)


def levels(units: Sequence[Unit], *, is_grid: bool) -> list[list[Unit]]:
    """The same rows, cut apart by length where that saves more than it costs; ascending."""
    cuts = _cuts([len(row.tokens) for unit in units for row in unit.rows])
    counts = [[0] * len(cuts) for _ in units]  # rows of a unit at each cut
    for unit, steps in zip(units, counts, strict=True):
        for row in unit.rows:
            steps[bisect_left(cuts, len(row.tokens))] += 1
    least, begins = [0.0], [0]  # tokens up to a cut, and where the level that ends there begins
    for end in range(1, len(cuts) + 1):
        best, at = math.inf, 0
        together = [0] * len(units)
        for begin in range(end - 1, -1, -1):
            together = [n + steps[begin] for n, steps in zip(together, counts, strict=True)]
            cost = least[begin] + _level_tokens(units, together, cuts[end - 1], is_grid)
            if cost < best:
                best, at = cost, begin
        least.append(best)
        begins.append(at)
    found: list[list[Unit]] = []
    end = len(cuts)
    while end:
        begin = begins[end]
        found.append(_between(units, cuts[begin - 1] if begin else 0, cuts[end - 1]))
        end = begin
    return found[::-1]


def _between(units: Sequence[Unit], above: int, most: int) -> list[Unit]:
    """Those of the rows that have so many tokens, and their units."""
    parts = [
        Unit(unit.prompt, [row for row in unit.rows if above < len(row.tokens) <= most])
        for unit in units
    ]
    return [part for part in parts if part.rows]


def _cuts(lengths: Sequence[int]) -> list[int]:
    """Some of the lengths, the longest among them, ascending."""
    known = sorted(set(lengths))
    count = min(len(known), CUTS_MAX)
    return [known[(place + 1) * len(known) // count - 1] for place in range(count)]


def _level_tokens(units: Sequence[Unit], rows: Sequence[int], tail: int, is_grid: bool) -> int:
    """The cost of running so many rows of each unit together, all padded to `tail`."""
    there = [unit for unit, count in zip(units, rows, strict=True) if count]
    cells = len(there) * max(rows) if is_grid else sum(rows)
    return sum(len(unit.prompt) for unit in there) + cells * tail + PASS_TOKENS


def _filled(units: Sequence[Unit], tokens_max: int, *, is_grid: bool) -> Iterator[list[Unit]]:
    """Micro-batches of units in an order in which neighbours are alike. One more prompt is left to
    the next where it would pad the others by more than a pass costs."""
    batch: list[Unit] = []
    for unit in sorted(units, key=lambda u: (len(u.rows) if is_grid else 0, len(u.prompt))):
        for piece in pieces(unit, tokens_max):
            whole = _padded([*batch, piece], is_grid)
            apart = _padded(batch, is_grid) + _padded([piece], is_grid) + PASS_TOKENS
            if batch and (whole > tokens_max or whole > apart):
                yield batch
                batch = []
            batch.append(piece)
    if batch:
        yield batch


def _padded(units: Sequence[Unit], is_grid: bool) -> int:
    if not units:
        return 0
    if not is_grid:
        return padded_tokens(units)
    widest = max(units, key=lambda unit: len(unit.rows))
    longest = max((row for unit in units for row in unit.rows), key=lambda row: len(row.tokens))
    return padded_tokens([Unit(unit.prompt, [longest] * len(widest.rows)) for unit in units])


def probe(batches: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
    """Of each micro-batch those rows on which a step is measured: own ones where there are any,
    from all over the batch, at most `PROBE_ROWS_MAX` and about `PROBE_TOKENS_MAX`."""
    rows = [row for batch in batches for unit in batch for row in unit.rows]
    rows = [row for row in rows if row.own] or rows
    chosen: set[int] = set()
    tokens = 0
    for row in rows[:: max(1, math.ceil(len(rows) / PROBE_ROWS_MAX))]:
        tokens += len(row.tokens)
        if chosen and tokens > PROBE_TOKENS_MAX:
            break
        chosen.add(id(row))
    return [
        [Unit(unit.prompt, [row for row in unit.rows if id(row) in chosen]) for unit in batch]
        for batch in batches
    ]
