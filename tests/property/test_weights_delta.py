"""Blocks come out bit for bit as they went in, and no bytes do harm."""

import random
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.weights import delta, entropy_coding
from swarm.weights.delta import (
    BLOCK_ELEMENTS_MAX,
    Classes,
    Method,
    Payload,
    all_of,
    as_units,
    choose_classes,
    class_words,
    count_of,
    decode_block,
    encode_delta,
    encode_full,
    ordered,
    ranks_of,
    select,
    unit_bytes,
)
from swarm.weights.entropy_coding import Array, PayloadReader, PayloadWriter
from swarm.weights.manifest import DTYPE_BITS
from tests.weights_files import bf16, stepped

FLOATS = ("BF16", "F16", "F32", "F64")
DTYPES = (*FLOATS, "I8", "I64", "U8", "F8_E4M3", "file")
SPECIAL = {  # ±0, smallest, largest, infinities, NaN with payloads, as bits
    "BF16": (0, 0x8000, 1, 0x8001, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF),
    "F16": (0, 0x8000, 1, 0x8001, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF),
    "F32": (0, 1 << 31, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF),
    "F64": (0, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (1 << 64) - 1),
}


def raw(units: Array) -> Array:
    return units.view(np.uint8)


def round_trip(
    new: Array, base: Array, dtype: str, classes: Classes | None = None
) -> Payload | None:
    """Encode, decode, compare; the payload, None where nothing changed."""
    chosen = choose_classes(raw(new), raw(base), dtype) if classes is None else classes
    payload = encode_delta(raw(new), raw(base), dtype, chosen)
    if payload is None:
        assert raw(new).tobytes() == raw(base).tobytes()
        return None
    view = memoryview(payload.content)
    count = new.nbytes // unit_bytes(dtype)
    made = decode_block(payload.method, view, dtype, count, raw(base).copy())
    assert made.tobytes() == new.tobytes()
    return payload


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, Array, Array]:
    """Two states of a block of random bits, some of them equal, some a few steps apart."""
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(st.integers(1, 1000))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kind = f"<u{unit_bytes(dtype)}"
    base = rng.integers(0, 256, count * unit_bytes(dtype), np.uint8).view(kind)
    other = rng.integers(0, 256, base.nbytes, np.uint8).view(kind)
    near = base + rng.integers(-3, 4, count).astype(kind)
    if dtype in SPECIAL:
        specials = np.array(SPECIAL[dtype], np.uint64).astype(kind)
        other = np.where(rng.random(count) < 0.5, rng.choice(specials, count), other)
        base = np.where(rng.random(count) < 0.3, rng.choice(specials, count), base)
    part = draw(st.sampled_from((0.0, 0.001, 0.02, 0.3, 0.9, 1.0)))
    moved = np.where(rng.random(count) < draw(st.sampled_from((0.0, 0.1, 1.0))), other, near)
    return dtype, np.where(rng.random(count) < part, moved, base), base


@given(pairs())
@pytest.mark.slow
def test_round_trip_is_bit_identical(pair: tuple[str, Array, Array]) -> None:
    dtype, new, base = pair
    round_trip(new, base, dtype)
    full = encode_full(raw(new), dtype)
    made = decode_block(full.method, memoryview(full.content), dtype, len(new), None)
    assert made.tobytes() == new.tobytes()
    assert len(full.content) <= new.nbytes


@given(pairs(), st.lists(st.integers(1, 0x7FFF), max_size=7, unique=True))
def test_any_classes_give_the_same(pair: tuple[str, Array, Array], cuts: list[int]) -> None:
    dtype, new, base = pair
    if dtype in FLOATS:
        shift = 8 * unit_bytes(dtype) - 16
        round_trip(new, base, dtype, Classes(tuple(cut << shift for cut in sorted(cuts)), 0.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.slow
def test_every_special_value_turns_into_every_other(dtype: str) -> None:
    kind = f"<u{unit_bytes(dtype)}"
    values = np.array(SPECIAL[dtype], np.uint64).astype(kind)
    base, new = (grid.reshape(-1) for grid in np.meshgrid(values, values))
    round_trip(np.tile(new, 20), np.tile(base, 20), dtype)


def test_a_sign_of_zero_is_a_change() -> None:
    """Compared as floats it would be none, and the result another file."""
    base = np.zeros(100, np.float32)
    new = -base
    assert np.array_equal(base, new)
    assert round_trip(new.view(np.uint32), base.view(np.uint32), "F32") is not None


def test_ordered_follows_the_floats() -> None:
    finite = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    floats = finite.view(np.float16)
    finite = finite[np.isfinite(floats)]
    by_order = finite[np.argsort(ordered(finite, "F16").view(np.int16), kind="stable")]
    sorted_floats = by_order.view(np.float16)
    assert np.all(sorted_floats[:-1] <= sorted_floats[1:])
    assert len(np.unique(ordered(finite, "F16"))) == len(finite)
    assert np.array_equal(ordered(ordered(finite, "F16"), "F16"), finite)


def weights(count: int, seed: int = 0) -> Array:
    return bf16(np.random.default_rng(seed).standard_normal(count) * 0.02)


def test_all_methods_come_up() -> None:
    rng = np.random.default_rng(0)
    base = weights(100_000)
    near = stepped(base, rng)
    noise = rng.integers(0, 1 << 16, 100_000).astype(np.uint16)
    xored = noise ^ (base & 0x00FF)  # the high bytes of the XOR are noise; low ones are few
    few = rng.integers(0, 4, 100_000).astype(np.uint16) * 0x4001
    found = {
        payload.method
        for payload in (
            round_trip(near, base, "BF16"),
            round_trip(weights(100_000, 1), noise, "BF16"),
            round_trip(noise ^ few, noise, "I16"),
            round_trip(noise, xored, "BF16"),
            encode_full(raw(noise), "BF16"),
        )
        if payload is not None
    }
    assert found == set(Method)
    assert round_trip(base, base, "BF16") is None


def test_many_bytes_that_change_by_much_have_a_finite_cost() -> None:
    """In half precision, numpy's own for the logarithm of bytes, their cost is infinite."""
    base = np.zeros(100_000, np.uint8)
    chosen = choose_classes(raw(base + np.uint8(100)), raw(base), "U8")
    assert 5.0 < chosen.bits < 20.0


def test_an_element_alone_and_the_last_of_a_word() -> None:
    for count in (1, 63, 64, 65, 128, 4096):
        for place in {0, count // 2, count - 1}:
            base = weights(count)
            new = base.copy()
            new[place] += np.uint16(1)
            round_trip(new, base, "BF16")
            round_trip(new, base, "BF16", Classes((0x3B80, 0x3C80), 0.0))


def test_classes_are_chosen_where_they_save() -> None:
    """An update of one size moves small weights over more roundings: classes must notice."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(1 << 20).astype(np.float32) * 0.02
    base, new = bf16(exact), bf16(exact + rng.standard_normal(1 << 20) * 5e-7)
    chosen = choose_classes(raw(new), raw(base), "BF16")
    assert len(chosen.thresholds) >= 2
    with_classes = round_trip(new, base, "BF16", chosen)
    without = round_trip(new, base, "BF16", Classes((), 0.0))
    assert with_classes is not None
    assert without is not None
    assert len(with_classes.content) < 0.85 * len(without.content)


@pytest.mark.parametrize(("dtype", "scale"), [("BF16", 5e-7), ("BF16", 1e-4), ("F32", 1e-6)])
def test_what_a_block_takes_is_foreseen(dtype: str, scale: float) -> None:
    """Else blocks would be cut too large, and encoded again."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(1 << 18).astype(np.float32) * np.float32(0.02)
    new = base + rng.standard_normal(1 << 18).astype(np.float32) * np.float32(scale)
    old, now = (bf16(each) if dtype == "BF16" else each.view(np.uint32) for each in (base, new))
    chosen = choose_classes(raw(now), raw(old), dtype)
    payload = round_trip(now, old, dtype, chosen)
    assert payload is not None
    assert 0.8 < chosen.bits * (1 << 18) / 8 / len(payload.content) < 1.2


@given(
    st.lists(st.integers(0, 1 << 40), min_size=1, max_size=200)
    | st.lists(st.integers(0, 3), min_size=1, max_size=2000)
    | st.lists(st.integers(0, 300), min_size=1, max_size=2000)
)
@example([0])
@example([255, 510, 511, 0])
def test_symbols_come_back(numbers: list[int]) -> None:
    writer = PayloadWriter()
    writer.symbols(np.array(numbers, np.uint64))
    reader = PayloadReader(memoryview(bytes(writer.content)))
    assert reader.symbols(len(numbers), 1 << 40).tolist() == numbers
    reader.end()
    if max(numbers):
        with pytest.raises(RemoteProtocolError):
            PayloadReader(memoryview(bytes(writer.content))).symbols(len(numbers), max(numbers) - 1)


@given(st.binary(min_size=2, max_size=4000), st.integers(1, 300))
def test_ranks_and_places_are_inverse(content: bytes, every: int) -> None:
    units = np.frombuffer(content[: len(content) // 2 * 2], np.uint16)
    magnitudes = units & np.uint16(0x7FFF)
    classes = class_words(units, (0x2000, 0x5000))
    low, high = magnitudes < 0x2000, magnitudes >= 0x5000
    for words, mask in zip(classes, (low, ~low & ~high, high), strict=True):
        places = np.flatnonzero(mask)
        assert count_of(words) == len(places)
        assert np.array_equal(all_of(words, len(units)), places)
        ranks = np.arange(0, len(places), every)
        assert np.array_equal(ranks_of(words, places[ranks]), ranks)
        for sparse in (0.0, 2.0):  # all at once, and one by one
            assert np.array_equal(select(words, ranks, len(units), sparse), places[ranks])


# --- bytes of a peer ---


def hostile(payload: bytes, dtype: str, method: int, base: Array | None, count: int) -> None:
    """Decodes, or raises what a peer's bytes may raise, within bounded memory."""
    tracemalloc.start()
    with suppress(RemoteProtocolError):
        decode_block(method, memoryview(payload), dtype, count, base)  # which is overwritten
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * count * unit_bytes(dtype) + (2 << 20)


@settings(max_examples=40)  # counting memory is slow
@given(pairs(), st.randoms(use_true_random=False), st.integers(0, 5))
@pytest.mark.slow
def test_damaged_blocks_do_no_harm(
    pair: tuple[str, Array, Array], random: random.Random, method: int
) -> None:
    dtype, new, base = pair
    payload = encode_delta(raw(new), raw(base), dtype, choose_classes(raw(new), raw(base), dtype))
    if payload is None:
        return
    damaged = bytearray(payload.content)
    for _ in range(random.randint(1, 4)):
        match random.randint(0, 2):
            case 0:
                damaged[random.randrange(len(damaged))] = random.randrange(256)
            case 1:
                del damaged[random.randrange(len(damaged)) :]
            case _:
                damaged.insert(random.randrange(len(damaged) + 1), random.randrange(256))
        if not damaged:
            break
    chosen = payload.method if random.random() < 0.7 else method
    hostile(bytes(damaged), dtype, chosen, raw(base), len(base))


@given(st.binary(max_size=300), st.integers(0, 4), st.integers(1, 5000), st.booleans())
def test_random_bytes_do_no_harm(content: bytes, method: int, count: int, based: bool) -> None:
    base = np.zeros(2 * count, np.uint8) if based else None
    hostile(content, "BF16", method, base, count)


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def stream_of(stored: bytes) -> bytes:
    writer = PayloadWriter()
    writer.varint(len(stored) << 1 | 1)
    return bytes(writer.content) + stored


@pytest.mark.parametrize(
    "stored",
    [
        frame(bytes(1 << 28)),  # a bomb that says so
        frame(bytes(1 << 28), write_content_size=False),  # and one that does not
        frame(bytes(1000), write_content_size=False),
        frame(bytes(999)),
        frame(bytes(1000)) + b"x",
        frame(bytes(1000)) * 2,
        frame(bytes(1000))[:-1],
        b"",
        bytes(20),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",  # a skippable frame
    ],
)
def test_a_frame_of_another_size_is_refused_unread(stored: bytes) -> None:
    content = stream_of(stored)
    assert len(content) < 100_000
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        PayloadReader(memoryview(content)).stream(1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_of_the_right_size_is_read() -> None:
    content = stream_of(frame(bytes(1000)))
    assert PayloadReader(memoryview(content)).stream(1000).tobytes() == bytes(1000)


@pytest.mark.parametrize(
    ("method", "count", "base"),
    [
        (Method.SPARSE, 10, None),
        (Method.XOR, 10, None),
        (Method.RAW, 0, None),
        (Method.RAW, -1, None),
        (Method.RAW, BLOCK_ELEMENTS_MAX + 1, None),
        (4, 10, np.zeros(20, np.uint8)),
        (-1, 10, np.zeros(20, np.uint8)),
        (Method.RAW, 51, None),
        (Method.RAW, 49, None),
    ],
)
def test_a_block_out_of_bounds_is_refused(method: int, count: int, base: Array | None) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_block(method, memoryview(bytes(100)), "BF16", count, base)
    assert len(decode_block(Method.RAW, memoryview(bytes(100)), "BF16", 50, None)) == 50


def sparse(*parts: int | bytes) -> bytes:
    writer = PayloadWriter()
    for part in parts:
        if isinstance(part, int):
            writer.varint(part)
        else:
            writer.content += part
    return bytes(writer.content)


@pytest.mark.parametrize(
    "payload",
    [
        sparse(8, *range(1, 9), *[0] * 9),  # too many classes
        sparse(2, 5, 5, 0, 0, 0),  # not ascending
        sparse(1, 0, 0, 0),  # a class of nothing below 0
        sparse(1, 1 << 15, 0, 0),  # beyond all magnitudes
        sparse(0, 1),  # dense, of nothing
        sparse(0, 101 << 1),  # more than there are
        sparse(0, 1 << 1, 3, 2 << 1, b"\x64\x00"),  # a gap to the element after the last
        sparse(0, 0, 0),  # left over
    ],
)
def test_a_sparse_block_that_lies_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_block(Method.SPARSE, memoryview(payload), "BF16", 100, np.zeros(200, np.uint8))


def test_a_fault_in_the_order_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the sign bit is forgotten, on one side as it would be on both."""
    base, rng = weights(1000), np.random.default_rng(0)
    new = stepped(base, rng, 0.5)
    payload = encode_delta(raw(new), raw(base), "BF16", Classes((), 0.0))
    assert payload is not None
    monkeypatch.setattr(delta, "ordered", lambda units, dtype: units)
    made = decode_block(payload.method, memoryview(payload.content), "BF16", 1000, raw(base).copy())
    assert made.tobytes() != new.tobytes()


def test_every_dtype_has_a_unit() -> None:
    for dtype, bits in DTYPE_BITS.items():
        unit = unit_bytes(dtype)
        assert unit * 8 == bits or unit == 1
        assert len(as_units(np.zeros(16, np.uint8), dtype)) * unit == 16


def test_streams_are_the_same_each_time() -> None:
    """Chunks are named by their hash: an encoder that varied would have peers fetch twice."""
    base, rng = weights(50_000), np.random.default_rng(0)
    new = stepped(base, rng)
    encoded = [
        encode_delta(raw(new), raw(base), "BF16", choose_classes(raw(new), raw(base), "BF16"))
        for _ in range(3)
    ]
    assert encoded[0] == encoded[1] == encoded[2]
    assert entropy_coding.compress(b"x" * 100) != entropy_coding.compress(b"y" * 100)
