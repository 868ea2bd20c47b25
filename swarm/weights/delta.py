"""The block codec of deltas, its classes of weights, and the check for configurations that name
code.

Loaders fetch and run the code that a configuration names (`auto_map`).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.weights.entropy_coding import TILE, Array, PayloadReader, PayloadWriter, malformed
from swarm.weights.manifest import DTYPE_BITS

AUTO_MAP: Final = "auto_map"
_SUFFIX: Final = "config.json"  # of all files in which loaders look for it
_BYTES_MAX: Final = 16 << 20


def names_code(directory: Path, names: Iterable[str] | None = None) -> str | None:
    """The first of these files that names code or is too large to check; None: none.

    `names` are relative; None: all files right in the directory. Blocks.
    """
    if names is None:
        names = [path.name for path in directory.glob(f"*{_SUFFIX}")]
    for name in sorted(name for name in names if name.endswith(_SUFFIX)):
        path = directory / name
        try:
            if path.stat().st_size > _BYTES_MAX or _is_named(json.loads(path.read_bytes())):
                return name
        except (OSError, ValueError, RecursionError):
            continue  # nothing that a loader could read
    return None


def _is_named(found: Any) -> bool:
    """True if there is such an entry, at any depth."""
    left = [found]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if each.get(AUTO_MAP):
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


# Classes of weights by magnitude. Pure.

EXPONENT_SHIFT = {"F16": 10, "BF16": 7, "F32": 23, "F64": 52}  # bits of a float's fraction
SAMPLE_RUN = 1024  # elements in a row, by which classes are chosen
SAMPLE_EVERY = 32  # of so many runs one is sampled
STEPS_TOLD_APART = 8  # in the estimate of a class's entropy
OCTAVE_BITS = 2  # estimated cost of the power of two of a larger step
CLASS_COST_BITS = 800  # estimated cost of a class by itself: counts, and tables of three streams
CHANGED_MIN = 256  # changes in the sample; with fewer there is one class
ALONE = 0.06  # share of changed elements from which one class holds the steps of all elements
SPARSE_SELECT = 0.012  # share of a block's elements up to which members are found one by one


@dataclass(frozen=True, slots=True)
class Classes:
    """The borders between classes, ascending; none: all elements are one class."""

    thresholds: tuple[int, ...]
    bits: float  # expected for each element


def classes_most(changed: float) -> int:
    """The number of classes that pays for this share of changed elements.

    Finding members takes time for all elements of each class: with many changes, longer than
    sending the tenth or fifth that it saves.
    """
    return 4 if changed < 0.03 else 2 if changed < ALONE else 1


def class_words(units: Array, thresholds: tuple[int, ...]) -> list[Array]:
    """The members of each class as bits of 64-bit words, the first element lowest.

    There is one class more than `thresholds`; bits after the last element are 0.
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
    counts = np.bitwise_count(words)
    before = np.cumsum(counts, dtype=np.int64) - counts
    word = places >> 6
    below = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
    ranks: Array = before[word] + np.bitwise_count(words[word] & below)
    return ranks


def count_of(words: Array) -> int:
    return int(np.bitwise_count(words).sum(dtype=np.int64))


def all_of(words: Array, count: int) -> Array:
    """The places of all members among `count` elements, ascending."""
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
    """The position in each word of its set bit of that rank: the byte by sums, the bit by a
    table."""
    ones, tops = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    sums = np.bitwise_count(words.view(np.uint8)).view("<u8") * ones  # of this byte and those below
    at_most = (((ranks * ones) | tops) - sums) & tops
    shift = np.bitwise_count(at_most).astype(np.uint64) << np.uint64(3)
    inside = ranks - (((sums << np.uint64(8)) >> shift) & np.uint64(0xFF))
    byte = (words >> shift) & np.uint64(0xFF)
    place: Array = shift.astype(np.int64) + IN_BYTE[(byte << np.uint64(3)) | inside]
    return place


def _in_byte() -> Array:
    """[8 * byte + rank]: the position in the byte of its set bit of that rank."""
    table = np.zeros((256, 8), np.int64)
    for byte in range(256):
        places = [place for place in range(8) if byte >> place & 1]
        table[byte, : len(places)] = places
    return table.reshape(-1)


IN_BYTE = _in_byte()


def choose(changed: Array, before: Array, steps: Array, dtype: str, count: int) -> Classes:
    """Classes for `count` elements, from a sample: which changed, its old elements, and the steps
    of those that changed. Of all cuts of the exponents into ranges, the one of least entropy."""
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
    """[i, j]: bits for bins i to j - 1 as one class. `table`: bins x kinds of change."""
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
    """The cheapest cuts into at most `most` classes, and their cost."""
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


# The block codec: the exact changes of a run of elements. Pure.

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
BLOCK_ELEMENTS_MAX = 1 << 22
BLOCK_BYTES_MAX = 1 << 24  # raw; with `BLOCK_ELEMENTS_MAX` it bounds the cost of applying a block
CLASSES_MAX = 8
DENSE = 0.4  # share of changed members above which the steps of all members replace gaps
TRY_ALL = 0.45  # share of the raw size above which the other methods are tried


class Method(IntEnum):
    """The encodings of a block's elements. The numbers are on the wire."""

    RAW = 0  # as they are
    PLANES = 1  # in byte planes
    SPARSE = 2  # which changed, and by how many steps
    XOR = 3  # XOR with the base, in byte planes

    @property
    def needs_base(self) -> bool:
        return self in (Method.SPARSE, Method.XOR)


@dataclass(frozen=True, slots=True)
class Payload:
    method: Method
    content: bytes


def unit_bytes(dtype: str) -> int:
    """The size of a block's element in bytes; types of other sizes are coded as bytes."""
    bits = DTYPE_BITS[dtype]
    return bits // 8 if bits in (8, 16, 32, 64) else 1


def as_units(content: Array, dtype: str) -> Array:
    """Raw bytes as the codec's integers, little-endian, one axis."""
    return content.reshape(-1).view(f"<u{unit_bytes(dtype)}")


def ordered(units: Array, dtype: str) -> Array:
    """Integers in the order of the floats whose bits `units` are; its own inverse.

    In two's complement -0 is -1, +0 is 0, the smallest positive 1. Integers stay as they are.
    """
    if dtype not in FLOATS:
        return units
    signed = units.view(f"<i{units.itemsize}")
    top = 8 * units.itemsize - 1
    turned: Array = units ^ ((signed >> top).view(units.dtype) & units.dtype.type((1 << top) - 1))
    return turned


def encode_full(new: Array, dtype: str) -> Payload:
    """Encode raw bytes without a base; RAW where planes save nothing."""
    payload = _planes(as_units(new, dtype), dtype, Method.PLANES)
    if len(payload.content) < new.nbytes:
        return payload
    return Payload(Method.RAW, new.tobytes())


def encode_delta(new: Array, base: Array, dtype: str, classes: Classes) -> Payload | None:
    """The changes from `base` to `new`, raw bytes of one size; None: none."""
    after, before = as_units(new, dtype), as_units(base, dtype)
    differs = after != before
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    payload = _sparse(after, before, differs, count, dtype, classes.thresholds)
    if len(payload.content) < TRY_ALL * new.nbytes or new.nbytes < 64:
        return payload
    others = [_planes(after ^ before, dtype, Method.XOR), encode_full(new, dtype)]
    return min(payload, *others, key=lambda each: len(each.content))


def choose_classes(new: Array, base: Array, dtype: str) -> Classes:
    """Classes for these raw bytes and those near them."""
    before = _sampled(as_units(base, dtype))
    after = _sampled(as_units(new, dtype))
    changed = after != before
    steps = ordered(after[changed], dtype) - ordered(before[changed], dtype)
    return choose(
        changed, before, np.minimum(steps, -steps), dtype, new.nbytes // unit_bytes(dtype)
    )


def _sampled(units: Array) -> Array:
    """Every `SAMPLE_EVERY`-th run of elements; all of them where there are few."""
    runs = len(units) // SAMPLE_RUN
    if runs < SAMPLE_EVERY * 4:
        return units
    return units[: runs * SAMPLE_RUN].reshape(runs, SAMPLE_RUN)[::SAMPLE_EVERY].reshape(-1)


def _planes(units: Array, dtype: str, method: Method) -> Payload:
    """Byte planes, the lowest first. Floats are rotated by a bit: the noisy sign goes to the lowest
    plane, and the exponent has the highest for itself."""
    if dtype in FLOATS:
        units = (units << units.dtype.type(1)) | (units >> units.dtype.type(8 * units.itemsize - 1))
    planes = units.view(np.uint8).reshape(-1, units.itemsize)
    writer = PayloadWriter()
    for plane in range(units.itemsize):
        writer.stream(planes[:, plane], text=dtype not in FLOATS)
    return Payload(method, bytes(writer.content))


def _from_planes(reader: PayloadReader, count: int, dtype: str) -> Array:
    width = unit_bytes(dtype)
    planes = np.empty((count, width), np.uint8)
    for plane in range(width):
        planes[:, plane] = reader.stream(count)
    units = planes.reshape(-1).view(f"<u{width}")
    if dtype in FLOATS:
        units = (units >> units.dtype.type(1)) | (units << units.dtype.type(8 * width - 1))
    return units


def _sparse(
    after: Array,
    before: Array,
    differs: Array,
    count: int,
    dtype: str,
    thresholds: tuple[int, ...],
) -> Payload:
    """Encode the `count` elements at which `differs` is true."""
    writer = PayloadWriter()
    writer.varint(len(thresholds))
    for threshold in thresholds:
        writer.varint(threshold)
    if not thresholds and count > ALONE * len(after):
        writer.varint(count << 1 | 1)
        writer.symbols(_all_steps(after, before, dtype))
        return Payload(Method.SPARSE, bytes(writer.content))
    changed = np.flatnonzero(differs)
    old = before[changed]
    steps = ordered(after[changed], dtype) - ordered(old, dtype)
    if not thresholds:
        _write_gaps(writer, changed, steps)
        return Payload(Method.SPARSE, bytes(writer.content))
    magnitudes = old & old.dtype.type((1 << (8 * old.itemsize - 1)) - 1)
    member_of = np.zeros(len(changed), np.uint8)
    for threshold in thresholds:
        member_of += magnitudes >= old.dtype.type(threshold)
    for number, words in enumerate(class_words(before, thresholds)):
        mine = np.flatnonzero(member_of == number)
        _write_class(writer, words, changed[mine], steps[mine])
    return Payload(Method.SPARSE, bytes(writer.content))


def _all_steps(after: Array, before: Array, dtype: str) -> Array:
    """The steps of all elements, zigzag."""
    told = np.empty(len(after), after.dtype)
    for start in range(0, len(after), TILE):
        part = slice(start, start + TILE)
        told[part] = zigzag(ordered(after[part], dtype) - ordered(before[part], dtype))
    return told


def zigzag(steps: Array) -> Array:
    """0, -1, 1, -2, ... (two's complement, unsigned) as 0, 1, 2, 3, ..."""
    negative = steps.view(f"<i{steps.itemsize}") >> (8 * steps.itemsize - 1)
    folded: Array = (steps << steps.dtype.type(1)) ^ negative.view(steps.dtype)
    return folded


def unzigzag(folded: Array) -> Array:
    one = folded.dtype.type(1)
    steps: Array = (folded >> one) ^ np.negative(folded & one)
    return steps


def _write_class(writer: PayloadWriter, words: Array, places: Array, steps: Array) -> None:
    """Write the members of one class of several that changed, and their steps."""
    members = count_of(words)
    ranks = ranks_of(words, places)
    if len(ranks) <= DENSE * members:
        _write_gaps(writer, ranks, steps)
        return
    writer.varint(len(ranks) << 1 | 1)
    told = np.zeros(members, steps.dtype)
    told[ranks] = zigzag(steps)
    writer.symbols(told)


def _write_gaps(writer: PayloadWriter, ranks: Array, steps: Array) -> None:
    """Write elements by the gaps between them, with their steps' sizes and signs."""
    writer.varint(len(ranks) << 1)
    if not len(ranks):
        return
    gaps = np.empty(len(ranks), np.uint32)
    gaps[0] = ranks[0]
    np.subtract(ranks[1:], ranks[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= np.uint32(1)
    writer.symbols(gaps)
    negative = steps.view(f"<i{steps.itemsize}") < 0
    sizes = steps.copy()
    np.negative(sizes, out=sizes, where=negative)
    writer.symbols(sizes - sizes.dtype.type(1))
    writer.stream(np.packbits(negative, bitorder="little"))


def decode_block(
    method: int, payload: memoryview, dtype: str, count: int, base: Array | None
) -> Array:
    """The `count` new elements of a block, as integers.

    `base`: the old raw bytes, which may be overwritten and are in disorder after an error. Raises
    `RemoteProtocolError` for whatever a peer sent; memory stays within a small multiple of the
    block's size, which the caller has bounded.
    """
    width = unit_bytes(dtype)
    if not 0 < count <= BLOCK_ELEMENTS_MAX or count * width > BLOCK_BYTES_MAX:
        raise malformed("a block has too many elements, or none")
    if method not in Method.__members__.values():
        raise malformed("unknown method")
    reader = PayloadReader(payload)
    if Method(method).needs_base:
        if base is None:
            raise malformed("a block needs a base, there is none")
        units = _with_base(Method(method), reader, dtype, as_units(base, dtype))
    elif method == Method.RAW:
        units = np.frombuffer(reader.take(count * width), f"<u{width}")
    else:
        units = _from_planes(reader, count, dtype)
    reader.end()
    return units


def _with_base(method: Method, reader: PayloadReader, dtype: str, before: Array) -> Array:
    if method == Method.XOR:
        return _from_planes(reader, len(before), dtype) ^ before
    thresholds = _read_thresholds(reader, dtype, before)
    if not thresholds:
        return _read_alone(reader, dtype, before)
    for words in class_words(before, thresholds):  # all of them are there before any is applied
        _read_class(reader, dtype, before, words)
    return before


def _read_thresholds(reader: PayloadReader, dtype: str, before: Array) -> tuple[int, ...]:
    count = reader.varint(CLASSES_MAX - 1 if dtype in FLOATS else 0)
    most = (1 << (8 * before.itemsize - 1)) - 1
    thresholds = tuple(reader.varint(most) for _ in range(count))
    if any(one >= other for one, other in pairwise((0, *thresholds))):
        raise malformed("classes are not in order")
    return thresholds


def _read_alone(reader: PayloadReader, dtype: str, before: Array) -> Array:
    marked = reader.varint(len(before) << 1 | 1)
    if not marked & 1:
        ranks, steps = _read_gaps(reader, marked >> 1, len(before), before.dtype)
        before[ranks] = _stepped(before[ranks], steps, dtype)
        return before
    told = _read_all(reader, marked >> 1, len(before), before.dtype)
    for start in range(0, len(before), TILE):
        part = slice(start, start + TILE)
        before[part] = _stepped(before[part], unzigzag(told[part]), dtype)
    return before


def _read_class(reader: PayloadReader, dtype: str, units: Array, words: Array) -> None:
    """Apply one class of several to `units`, in place."""
    members = count_of(words)
    marked = reader.varint(members << 1 | 1)
    if marked & 1:
        told = _read_all(reader, marked >> 1, members, units.dtype)
        places, steps = all_of(words, len(units)), unzigzag(told)
    elif marked:
        ranks, steps = _read_gaps(reader, marked >> 1, members, units.dtype)
        places = select(words, ranks, len(units))
    else:
        return
    units[places] = _stepped(units[places], steps, dtype)


def _stepped(units: Array, steps: Array, dtype: str) -> Array:
    return ordered(ordered(units, dtype) + steps, dtype)


def _read_all(reader: PayloadReader, count: int, members: int, dtype: np.dtype[Any]) -> Array:
    """The zigzag steps of all members, `count` of which are not 0."""
    if not count:
        raise malformed("a dense class of nothing")
    told = reader.symbols(members, (1 << 8 * dtype.itemsize) - 1)
    if np.count_nonzero(told) != count:
        raise malformed("a dense class with another count")
    return told


def _read_gaps(
    reader: PayloadReader, count: int, members: int, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Ranks, ascending and below `members`, and their steps."""
    if not count:
        raise malformed("changes of nothing")
    if count > members:
        raise malformed("more changes than elements")
    ranks = np.cumsum(reader.symbols(count, members - 1), dtype=np.int64)
    ranks += np.arange(count)
    if int(ranks[-1]) >= members:
        raise malformed("a change after the last element")
    steps = reader.symbols(count, (1 << (8 * dtype.itemsize - 1)) - 1).astype(dtype)
    steps += dtype.type(1)
    packed = reader.stream(-(-count // 8))
    negative = np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
    np.negative(steps, out=steps, where=negative)
    return ranks, steps
