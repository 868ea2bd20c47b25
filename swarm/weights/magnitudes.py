"""Classes of weights by their magnitude: choosing them, and counting within one. Pure.

A class is a range of magnitudes of the *old* weights, which both sides have. Its members keep their
order; a member's rank is how many others of its class come before it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.weights.streams import Array

EXPONENT_SHIFT = {"F16": 10, "BF16": 7, "F32": 23, "F64": 52}
"""How many bits of a float are its fraction: above them, magnitudes are powers of two."""
SAMPLE_RUN = 1024
SAMPLE_EVERY = 16
"""Classes are chosen by runs of 1,024 elements, one of 16."""
STEPS_TOLD_APART = 8
CLASS_COST_BITS = 800
"""What a class takes by itself: counts, and tables of three streams."""
CHANGED_MIN = 256
"""With fewer changes in the sample than this there is one class."""
SPARSE_SELECT = 0.012
"""Up to this part of a block's elements, members are found one by one, not all at once."""


@dataclass(frozen=True, slots=True)
class Classes:
    """Where one class ends and the next begins, ascending; none: all elements are one class.

    `bits` is what an element is expected to take.
    """

    thresholds: tuple[int, ...]
    bits: float


def classes_most(changed: float) -> int:
    """How many classes are worth their time, where this part of the elements changed: applying
    takes longer for each, and they gain less when much changed."""
    return 6 if changed < 0.03 else 3 if changed < 0.2 else 2


def class_mask(magnitudes: Array, thresholds: tuple[int, ...], number: int) -> Array | None:
    """Which elements are members; None: all."""
    mask = None
    if number:
        mask = magnitudes >= magnitudes.dtype.type(thresholds[number - 1])
    if number < len(thresholds):
        below = magnitudes < magnitudes.dtype.type(thresholds[number])
        mask = below if mask is None else np.logical_and(mask, below, out=below)
    return mask


def class_bits(magnitudes: Array, thresholds: tuple[int, ...], number: int) -> Array:
    """The mask as 64-bit words, the first element lowest; bits after the last are 0."""
    mask = class_mask(magnitudes, thresholds, number)
    assert mask is not None
    return words_of(mask)


def words_of(mask: Array) -> Array:
    """A mask as 64-bit words, the first element lowest; bits after the last are 0."""
    packed = np.packbits(mask, bitorder="little")
    words = np.zeros(-(-len(packed) // 8) * 8, np.uint8)
    words[: len(packed)] = packed
    return words.view("<u8")


def ranks_of(words: Array, places: Array) -> tuple[Array, int]:
    """The ranks of members at `places`, and how many members there are at all."""
    until = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    word = places >> 6
    below = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
    inside = np.bitwise_count(words[word] & below)
    before = until[word] - np.bitwise_count(words[word])
    return before + inside, int(until[-1])


def select(mask: Array, ranks: Array | None, sparse: float = SPARSE_SELECT) -> Array:
    """The places of members by rank, ascending; None: of all. The inverse of `ranks_of`."""
    if ranks is None:
        return np.flatnonzero(mask)
    if len(ranks) > sparse * len(mask):
        return np.flatnonzero(mask)[ranks]
    words = words_of(mask)
    until = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    word = np.searchsorted(until, ranks, side="right")
    left = ranks - until[word] + np.bitwise_count(words[word])  # how many members before it, in it
    return (word << 6) + _select_in_word(words[word], left)


def _select_in_word(words: Array, ranks: Array) -> Array:
    """The place of the set bit of that rank, for each word: by halves, then a smaller half ..."""
    place = np.zeros(len(words), np.int64)
    left = ranks.astype(np.int64)
    for half in (32, 16, 8, 4, 2, 1):
        low = (words >> place.astype(np.uint64)) & np.uint64((1 << half) - 1)
        count = np.bitwise_count(low).astype(np.int64)
        upper = left >= count
        left -= np.where(upper, count, 0)
        place += np.where(upper, half, 0)
    return place


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
