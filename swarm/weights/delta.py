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

import numpy as np

from swarm.weights.layout import DTYPE_BITS
from swarm.weights.magnitudes import (
    SAMPLE_EVERY,
    SAMPLE_RUN,
    Classes,
    choose,
    class_bits,
    class_mask,
    ranks_of,
    select,
)
from swarm.weights.streams import Array, Reader, Writer, malformed

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
BLOCK_ELEMENTS_MAX = 1 << 22
BLOCK_BYTES_MAX = 1 << 24
"""Of a block, raw. Both bounds hold, so that what applying one takes is bounded too."""
CLASSES_MAX = 8
DENSE = 0.5
"""Where more of a class than this changed, all its members are told instead of gaps."""
TRY_ALL = 0.45
"""Above this part of the raw size, the other methods are tried as well."""


class Method(IntEnum):
    """How a block's elements are told. Numbers are on the wire."""

    RAW = 0  # as they are
    PLANES = 1  # in byte planes
    SPARSE = 2  # which changed, and by how many steps
    XOR = 3  # XOR with the base, in byte planes

    @property
    def needs_base(self) -> bool:
        """Whether it says nothing without the base."""
        return self in (Method.SPARSE, Method.XOR)


@dataclass(frozen=True, slots=True)
class Payload:
    """A block's method and its bytes."""

    method: Method
    content: bytes


def unit_bytes(dtype: str) -> int:
    """What one element of a block takes: types of no whole power of two bytes go as bytes."""
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
    """From `base` to `new`, raw bytes of one size; None where they are the same."""
    after, before = as_units(new, dtype), as_units(base, dtype)
    changed = np.flatnonzero(after != before)
    if not len(changed):
        return None
    payload = _sparse(after, before, changed, dtype, classes)
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
    writer = Writer()
    for plane in range(units.itemsize):
        writer.stream(planes[:, plane])
    return Payload(method, bytes(writer.content))


def _from_planes(reader: Reader, count: int, dtype: str) -> Array:
    width = unit_bytes(dtype)
    planes = np.empty((count, width), np.uint8)
    for plane in range(width):
        planes[:, plane] = reader.stream(count)
    units = planes.reshape(-1).view(f"<u{width}")
    if dtype in FLOATS:
        units = (units >> units.dtype.type(1)) | (units << units.dtype.type(8 * width - 1))
    return units


def _sparse(after: Array, before: Array, changed: Array, dtype: str, classes: Classes) -> Payload:
    """`changed`: the indices where both differ, ascending."""
    steps = ordered(after[changed], dtype) - ordered(before[changed], dtype)
    writer = Writer()
    writer.varint(len(classes.thresholds))
    for threshold in classes.thresholds:
        writer.varint(threshold)
    if not classes.thresholds:
        _write_class(writer, changed, steps, len(after))
        return Payload(Method.SPARSE, bytes(writer.content))
    magnitudes = magnitudes_of(before)
    member_of = np.searchsorted(classes.thresholds, magnitudes[changed], side="right")
    for number in range(len(classes.thresholds) + 1):
        mine = member_of == number
        bits = class_bits(magnitudes, classes.thresholds, number)
        ranks, members = ranks_of(bits, changed[mine])
        _write_class(writer, ranks, steps[mine], members)
    return Payload(Method.SPARSE, bytes(writer.content))


def magnitudes_of(units: Array) -> Array:
    """Floats without their sign, as integers."""
    magnitudes: Array = units & units.dtype.type((1 << (8 * units.itemsize - 1)) - 1)
    return magnitudes


def _write_class(writer: Writer, ranks: Array, steps: Array, members: int) -> None:
    """One class: which of its members changed, and their steps (unsigned, two's complement)."""
    signed = steps.view(f"<i{steps.itemsize}")
    negative = signed < 0
    sizes = np.where(negative, -steps, steps)
    dense = len(ranks) > DENSE * members
    writer.varint(len(ranks) << 1 | dense)
    if not len(ranks):
        return
    if dense:
        told = np.zeros(members, sizes.dtype)
        told[ranks] = sizes
    else:
        gaps = np.empty(len(ranks), np.uint32)
        gaps[0] = ranks[0]
        np.subtract(ranks[1:], ranks[:-1], out=gaps[1:], casting="unsafe")
        gaps[1:] -= np.uint32(1)
        writer.symbols(gaps)
        told = sizes - sizes.dtype.type(1)
    writer.symbols(told)
    writer.stream(np.packbits(negative, bitorder="little"))


def decode_block(
    method: int, payload: memoryview, dtype: str, count: int, base: Array | None
) -> Array:
    """The new elements of a block, as integers; `count` of them.

    `base` are the old ones' raw bytes, None where there are none. Bytes are a peer's: whatever is
    wrong with them raises `RemoteProtocolError`, and memory stays within a small multiple of the
    block's own size, which the caller has bounded.
    """
    width = unit_bytes(dtype)
    if not 0 < count <= BLOCK_ELEMENTS_MAX or count * width > BLOCK_BYTES_MAX:
        raise malformed("a block has too many elements, or none")
    if method not in Method.__members__.values():
        raise malformed("unknown method")
    reader = Reader(payload)
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


def _with_base(method: Method, reader: Reader, dtype: str, before: Array) -> Array:
    if method == Method.XOR:
        return _from_planes(reader, len(before), dtype) ^ before
    thresholds = _read_thresholds(reader, dtype, before)
    after = before.copy()
    magnitudes = magnitudes_of(before) if thresholds else before
    for number in range(len(thresholds) + 1):
        _read_class(reader, dtype, before, after, thresholds, number, magnitudes)
    return after


def _read_thresholds(reader: Reader, dtype: str, before: Array) -> tuple[int, ...]:
    count = reader.varint(CLASSES_MAX - 1 if dtype in FLOATS else 0)
    most = (1 << (8 * before.itemsize - 1)) - 1
    thresholds = tuple(reader.varint(most) for _ in range(count))
    if any(one >= other for one, other in zip((0, *thresholds), thresholds, strict=False)):
        raise malformed("classes are not in order")
    return thresholds


def _read_class(
    reader: Reader,
    dtype: str,
    before: Array,
    after: Array,
    thresholds: tuple[int, ...],
    number: int,
    magnitudes: Array,
) -> None:
    """Apply one class to `after`."""
    marked = reader.varint(len(before) << 1 | 1)
    count, dense = marked >> 1, marked & 1
    if not count:
        if dense:
            raise malformed("a dense class of nothing")
        return
    mask = class_mask(magnitudes, thresholds, number)
    members = len(before) if mask is None else int(np.count_nonzero(mask))
    if count > members:
        raise malformed("more changes than elements")
    most = 1 << (8 * before.itemsize - 1)
    if dense:
        ranks = None
        sizes = reader.symbols(members, most)
    else:
        ranks = _read_ranks(reader, count, members)
        sizes = reader.symbols(count, most - 1) + 1
    places = ranks if mask is None else select(mask, ranks)
    if dense:
        told = np.flatnonzero(sizes)
        if len(told) != count:
            raise malformed("a dense class with another count")
        places, sizes = told if places is None else places[told], sizes[told]
    assert places is not None
    packed = reader.stream(-(-count // 8))
    negative = np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
    steps = sizes.astype(before.dtype)
    np.negative(steps, out=steps, where=negative)
    after[places] = ordered(ordered(before[places], dtype) + steps, dtype)


def _read_ranks(reader: Reader, count: int, members: int) -> Array:
    """Ascending, all below `members`."""
    gaps = reader.symbols(count, members)
    gaps += gaps.dtype.type(1)
    ranks = np.cumsum(gaps, dtype=np.int64)
    ranks -= 1
    if int(ranks[-1]) >= members:
        raise malformed("a change after the last element")
    return ranks
