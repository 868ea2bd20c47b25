"""Classes of weights by their magnitude: choosing them, and counting within one. Pure.

A class is a range of magnitudes of the *old* weights, which both sides have. Its members keep their
order; a member's rank is how many others of its class come before it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.weights.format.entropy_coding import TILE, Array

EXPONENT_SHIFT = {"F16": 10, "BF16": 7, "F32": 23, "F64": 52}
"""How many bits of a float are its fraction: above them, magnitudes are powers of two."""
SAMPLE_RUN = 1024
SAMPLE_EVERY = 32
"""Classes are chosen by runs of 1,024 elements, one of 32."""
STEPS_TOLD_APART = 8
OCTAVE_BITS = 2
"""About what it takes to say between which powers of two a step farther than that is."""
CLASS_COST_BITS = 800
"""What a class takes by itself: counts, and tables of three streams."""
CHANGED_MIN = 256
"""With fewer changes in the sample than this there is one class."""
ALONE = 0.06
"""From this part of changed elements on there is one class, and all its members are told: nothing
is gathered then."""
SPARSE_SELECT = 0.012
"""Up to this part of a block's elements, members are found one by one, not all at once."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The borders between classes, ascending; none: all elements are one class.

    `bits` is what an element is expected to take.
    """

    thresholds: tuple[int, ...]
    bits: float


def classes_most(changed: float) -> int:
    """The number of classes that pay where this part of the elements changed. Finding members
    takes time in proportion to all elements for each class, and to all changes. With many changes
    that is longer than sending the tenth or fifth that it saves."""
    return 4 if changed < 0.03 else 2 if changed < ALONE else 1


def class_words(units: Array, thresholds: tuple[int, ...]) -> list[Array]:
    """For each class which elements are members, as 64-bit words, the first element lowest.

    There are one more classes than `thresholds`; bits after the last element are 0.
    """
    count = len(units)
    above = np.zeros((len(thresholds) + 1, -(-count // 64) * 8), np.uint8)
    unsigned = units.dtype.type((1 << (8 * units.itemsize - 1)) - 1)
    magnitudes = np.empty(TILE, units.dtype)
    flags = np.empty(TILE, np.bool_)
    for start in range(0, count, TILE):
        tile = units[start : start + TILE]
        size = len(tile)
        np.bitwise_and(tile, unsigned, out=magnitudes[:size])
        for row, threshold in zip(above[1:], thresholds, strict=True):
            np.greater_equal(magnitudes[:size], units.dtype.type(threshold), out=flags[:size])
            bits = np.packbits(flags[:size], bitorder="little")
            row[start // 8 : start // 8 + len(bits)] = bits
    above[0, : count // 8] = 0xFF
    if count % 8:
        above[0, count // 8] = (1 << count % 8) - 1
    rows = [row.view("<u8") for row in above]
    return [row & ~higher for row, higher in pairwise(rows)] + [rows[-1]]


def ranks_of(words: Array, places: Array) -> Array:
    """The ranks of the members at `places`."""
    counts = np.bitwise_count(words)
    before = np.cumsum(counts, dtype=np.int64) - counts
    word = places >> 6
    below = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
    ranks: Array = before[word] + np.bitwise_count(words[word] & below)
    return ranks


def count_of(words: Array) -> int:
    """The number of members."""
    return int(np.bitwise_count(words).sum(dtype=np.int64))


def all_of(words: Array, count: int) -> Array:
    """The places of all members, ascending; `count` is that of all elements."""
    bits = np.unpackbits(words.view(np.uint8), count=count, bitorder="little")
    return np.flatnonzero(bits.view(np.bool_))


def select(words: Array, ranks: Array, count: int, sparse: float = SPARSE_SELECT) -> Array:
    """The places of members by rank, ascending: the inverse of `ranks_of`."""
    if len(ranks) > sparse * count:
        return all_of(words, count)[ranks]
    counts = np.bitwise_count(words)
    until = np.cumsum(counts, dtype=np.int64)
    word = np.searchsorted(until, ranks, side="right")
    left = ranks - (until - counts)[word]  # how many members before it, in its word
    return (word << 6) + _select_in_word(words[word], left.astype(np.uint64))


def _select_in_word(words: Array, ranks: Array) -> Array:
    """The position in each word of the set bit of that rank. Sums over bytes, compared all at
    once, find the byte; a table finds the bit."""
    ones, tops = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    sums = np.bitwise_count(words.view(np.uint8)).view("<u8") * ones  # of this byte and those below
    at_most = (((ranks * ones) | tops) - sums) & tops
    shift = np.bitwise_count(at_most).astype(np.uint64) << np.uint64(3)
    inside = ranks - (((sums << np.uint64(8)) >> shift) & np.uint64(0xFF))
    byte = (words >> shift) & np.uint64(0xFF)
    place: Array = shift.astype(np.int64) + IN_BYTE[(byte << np.uint64(3)) | inside]
    return place


def _in_byte() -> Array:
    """[8 * byte + rank]: where in the byte the set bit of that rank is."""
    table = np.zeros((256, 8), np.int64)
    for byte in range(256):
        places = [place for place in range(8) if byte >> place & 1]
        table[byte, : len(places)] = places
    return table.reshape(-1)


IN_BYTE = _in_byte()


def choose(changed: Array, before: Array, steps: Array, dtype: str, count: int) -> Classes:
    """Classes for `count` elements, of which a sample is known: which changed, its old elements,
    and how far those that changed went.

    Of all ways to cut the exponents into ranges the one is taken whose entropy is least.
    """
    if not len(steps):
        return Classes((), 0.0)
    shift = EXPONENT_SHIFT.get(dtype)
    exponents = np.zeros(len(before), np.int64)
    if shift is not None:
        sign = before.dtype.type(1 << (8 * before.itemsize - 1))
        exponents = ((before & ~sign) >> before.dtype.type(shift)).astype(np.int64)
    low, kinds = int(exponents.min()), STEPS_TOLD_APART + 1
    bins = int(exponents.max()) - low + 1
    told = np.zeros(len(before), np.int64)
    told[changed] = np.minimum(steps, STEPS_TOLD_APART)
    table = np.bincount((exponents - low) * kinds + told, minlength=bins * kinds)
    weight = count / len(before)
    few = shift is None or len(steps) * weight < CHANGED_MIN
    most = 1 if few else classes_most(len(steps) / len(before))
    cuts, cost = _cut(_costs(table.reshape(bins, kinds) * weight), most)
    far = steps[steps > STEPS_TOLD_APART]
    # of bytes numpy would take the logarithm, and add up, in half precision
    cost += weight * float((np.log2(far, dtype=np.float64) + OCTAVE_BITS).sum())
    return Classes(tuple((low + cut) << (shift or 0) for cut in cuts), cost / count)


def _costs(table: NDArray[Any]) -> NDArray[np.float64]:
    """[i, j]: bits for bins i to j - 1 as one class; 0 for no bins. `table`: bins × kinds of
    change."""
    sums = np.concatenate([np.zeros((1, table.shape[1])), table.cumsum(axis=0)])
    inside = np.maximum(sums[None, :, :] - sums[:, None, :], 0)
    total = inside.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(inside > 0, inside * np.log2(total / inside), 0).sum(axis=2)
    signs = inside[:, :, 1:].sum(axis=2)
    costs: NDArray[np.float64] = bits + signs + CLASS_COST_BITS
    costs[np.tril_indices(len(costs), -1)] = np.inf
    np.fill_diagonal(costs, 0)
    return costs


def _cut(costs: NDArray[np.float64], most: int) -> tuple[list[int], float]:
    """The cheapest cuts into at most `most` classes, and what these cost."""
    best = np.full(len(costs), np.inf)
    best[0] = 0
    came_from = []
    for _ in range(most):
        ways = best[:, None] + costs
        came_from.append(ways.argmin(axis=0))
        best = ways.min(axis=0)
    end, cuts = len(costs) - 1, set()
    for step in reversed(came_from):
        end = int(step[end])
        cuts.add(end)
    return sorted(cuts - {0, len(costs) - 1}), float(best[-1])
