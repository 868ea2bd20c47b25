"""The block codec: what of a run of elements changed, exactly, in few bytes. Pure.

Of 16-bit weights one small step of Adam changes few, and these by one unit in the last place or
two. So a block tells which elements changed, as gaps, and by how many steps: in the integer view in
which consecutive floats are consecutive integers. Nothing is ever compared or added as floats,
hence ±0, NaN and infinities are integers like any other and the result is bit for bit the same.

An update of the same size moves a small weight over more roundings than a large one. The receiver
has the old weights, so gaps are counted, and steps coded, apart for classes of magnitude: that
takes about a quarter off what any code needs that knows only how often elements change.

A block whose elements nearly all changed goes as the XOR of both states, or as the new state alone,
in byte planes; whatever comes out smallest.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

from swarm.weights.format.entropy_coding import TILE, Array, PayloadReader, PayloadWriter, malformed
from swarm.weights.format.layout import DTYPE_BITS
from swarm.weights.format.magnitude_classes import (
    ALONE,
    SAMPLE_EVERY,
    SAMPLE_RUN,
    Classes,
    all_of,
    choose,
    class_words,
    count_of,
    ranks_of,
    select,
)

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
BLOCK_ELEMENTS_MAX = 1 << 22
BLOCK_BYTES_MAX = 1 << 24
"""Of a block, raw. Both bounds hold, so that what applying one takes is bounded too."""
CLASSES_MAX = 8
DENSE = 0.4
"""Where more of a class than this changed, all its members are told instead of gaps."""
TRY_ALL = 0.45
"""Above this part of the raw size, the other methods are tried as well."""


class Method(IntEnum):
    """The encodings of a block's elements. The numbers are on the wire."""

    RAW = 0  # as they are
    PLANES = 1  # in byte planes
    SPARSE = 2  # which changed, and by how many steps
    XOR = 3  # XOR with the base, in byte planes

    @property
    def needs_base(self) -> bool:
        """True if it cannot be read without the base."""
        return self in (Method.SPARSE, Method.XOR)


@dataclass(frozen=True, slots=True)
class Payload:
    """A block's method and its bytes."""

    method: Method
    content: bytes


def unit_bytes(dtype: str) -> int:
    """The size of a block's element in bytes: types of no whole power of two bytes go as bytes."""
    bits = DTYPE_BITS[dtype]
    return bits // 8 if bits in (8, 16, 32, 64) else 1


def as_units(content: Array, dtype: str) -> Array:
    """Raw bytes as the integers that the codec works on, little-endian, one axis."""
    return content.reshape(-1).view(f"<u{unit_bytes(dtype)}")


def ordered(units: Array, dtype: str) -> Array:
    """Integers in the order of the floats whose bits `units` are; its own inverse.

    As two's complement: ..., -0 is -1, +0 is 0, the smallest positive is 1, ... Integers are
    returned as they are.
    """
    if dtype not in FLOATS:
        return units
    signed = units.view(f"<i{units.itemsize}")
    top = 8 * units.itemsize - 1
    turned: Array = units ^ ((signed >> top).view(units.dtype) & units.dtype.type((1 << top) - 1))
    return turned


def encode_full(new: Array, dtype: str) -> Payload:
    """Without a base: `new` are raw bytes. RAW where planes save nothing."""
    return _smaller(_planes(as_units(new, dtype), dtype, Method.PLANES), new)


def encode_delta(new: Array, base: Array, dtype: str, classes: Classes) -> Payload | None:
    """The way from `base` to `new`, raw bytes of one size; None where they are the same."""
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
    """Classes for these raw bytes and those near them, and what an element will about take."""
    before = _sampled(as_units(base, dtype))
    after = _sampled(as_units(new, dtype))
    changed = after != before
    steps = ordered(after[changed], dtype) - ordered(before[changed], dtype)
    return choose(
        changed, before, np.minimum(steps, -steps), dtype, new.nbytes // unit_bytes(dtype)
    )


def _sampled(units: Array) -> Array:
    """Every so many runs of elements; all of them where there are few."""
    runs = len(units) // SAMPLE_RUN
    if runs < SAMPLE_EVERY * 4:
        return units
    return units[: runs * SAMPLE_RUN].reshape(runs, SAMPLE_RUN)[::SAMPLE_EVERY].reshape(-1)


def _smaller(payload: Payload, new: Array) -> Payload:
    if len(payload.content) < new.nbytes:
        return payload
    return Payload(Method.RAW, new.tobytes())


def _planes(units: Array, dtype: str, method: Method) -> Payload:
    """Byte planes, the lowest first. Floats are turned by a bit, so that the sign is in the lowest
    plane, with what is noise, and the exponent has the highest for itself."""
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
    """`differs`: at which elements, `count` of them."""
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
    """The other way."""
    one = folded.dtype.type(1)
    steps: Array = (folded >> one) ^ np.negative(folded & one)
    return steps


def _write_class(writer: PayloadWriter, words: Array, places: Array, steps: Array) -> None:
    """One class of several: which of its members changed, and their steps."""
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
    """Elements by the gaps between them, with their steps' sizes and signs."""
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
    """The new elements of a block, as integers; `count` of them.

    `base` are the old ones' raw bytes, None where there are none; they may be overwritten with the
    new ones, and are in disorder after an error. Bytes are a peer's: whatever is
    wrong with them raises `RemoteProtocolError`, and memory stays within a small multiple of the
    block's own size, which the caller has bounded.
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
    """Elements that are one class."""
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
    """The steps of all members, `count` of which are not 0; zigzag."""
    if not count:
        raise malformed("a dense class of nothing")
    told = reader.symbols(members, (1 << 8 * dtype.itemsize) - 1)
    if np.count_nonzero(told) != count:
        raise malformed("a dense class with another count")
    return told


def _read_gaps(
    reader: PayloadReader, count: int, members: int, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Ranks, ascending and below `members`, and the steps there."""
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
