"""Artifacts: a version, or its changes, cut into chunks; and chunks patched into files.

A chunk is magic bytes and blocks. A block names its entry by index, its elements and its encoding,
so chunks are applied in any order, by several threads, twice if need be. Cuts of a full artifact
depend on names and sizes alone: equal tensors of two versions are in equal chunks. Memory is that
of a few blocks for each thread.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from swarm.errors import Reject, RemoteProtocolError, WeightsMismatch
from swarm.weights.delta import (
    BLOCK_BYTES_MAX,
    BLOCK_ELEMENTS_MAX,
    Classes,
    Method,
    Payload,
    choose_classes,
    decode_block,
    encode_delta,
    encode_full,
    unit_bytes,
)
from swarm.weights.entropy_coding import Array, PayloadReader, PayloadWriter, malformed
from swarm.weights.manifest import (
    ENTRIES_MAX,
    HEADER_DTYPE,
    READ_BYTES,
    VERSION_BYTES_MAX,
    TensorSpec,
    WeightsDirectory,
    WeightsWriter,
    check_header,
    state_of,
)
from swarm.wire.messages import CHUNK_BYTES_MAX

MAGIC = b"SWC\x01"  # first bytes of a chunk
CHUNK_TARGET_MAX = CHUNK_BYTES_MAX // 2
CHUNK_TARGET_MIN = 1 << 12
SUGGESTED_BYTES = (  # largest artifact, and the size of its chunks
    (32 << 20, 64 << 10),
    (96 << 20, 128 << 10),
    (320 << 20, 256 << 10),
    (768 << 20, 512 << 10),
    (4 << 30, 1 << 20),
    (12 << 30, 2 << 20),
    (48 << 30, 4 << 20),
)
BLOCKS_MAX = 4096  # of one chunk: bounds the memory for a chunk of tiny blocks
RANGES_MAX = 1 << 19  # blocks of one version; one of a trillion weights has half as many
PIECE_ALIGNMENT = 64  # elements: pieces of an entry begin at multiples of it


def suggested_chunk_bytes(size_bytes: int) -> int:
    """The chunk size for an artifact: small for early swaps, large for few requests."""
    for limit, chunk_bytes in SUGGESTED_BYTES:
        if size_bytes <= limit:
            return chunk_bytes
    return CHUNK_TARGET_MAX


def estimated_bytes(new: WeightsDirectory, base: WeightsDirectory | None) -> int:
    """The approximate size of an artifact, from a sample of each tensor."""
    before = {} if base is None else {spec.name: spec for spec in base.specs}
    total = 0.0
    for spec in new.specs:
        old = before.get(spec.name)
        if base is None or old is None or not comparable(spec, old):
            total += spec.size_bytes
        elif spec.sha256 != old.sha256:
            size_bytes = min(spec.size_bytes, READ_BYTES // 16 * unit_bytes(spec.dtype))
            start = (spec.size_bytes - size_bytes) // 128 * 64
            size_bytes -= size_bytes % unit_bytes(spec.dtype)
            classes = choose_classes(
                new.read(spec, start, size_bytes), base.read(old, start, size_bytes), spec.dtype
            )
            total += classes.bits / 8 * spec.size_bytes / unit_bytes(spec.dtype)
    return int(total)


def comparable(spec: TensorSpec, base: TensorSpec) -> bool:
    return spec.dtype == base.dtype and spec.size_bytes == base.size_bytes


def encode_artifact(
    new: WeightsDirectory, base: WeightsDirectory | None, chunk_bytes: int
) -> Iterator[bytes]:
    """The chunks that take `base`, or nothing, to `new`.

    Chunks have about `chunk_bytes`, at most half as many again and some; the last, and those before
    a large tensor of a full artifact, fewer. Equal states give equal chunks under one release of
    zstd. Raises `StorageFailed`; `ValueError` for sizes out of bounds.
    """
    if not CHUNK_TARGET_MIN <= chunk_bytes <= CHUNK_TARGET_MAX:
        raise ValueError(f"chunks of {chunk_bytes} bytes")
    return _encode_full(new, chunk_bytes) if base is None else _encode_delta(new, base, chunk_bytes)


class _Block(NamedTuple):
    begin: int  # in elements
    size: int
    payload: Payload
    raw_bytes: int = 0  # that it stands for, in a full artifact


class _Cutter:
    """Gathers blocks into chunks."""

    def __init__(self) -> None:
        self._writer = PayloadWriter()
        self._blocks = 0
        self.raw_bytes = 0  # that the blocks stand for

    def __len__(self) -> int:
        return len(self._writer.content)

    def add(self, index: int, block: _Block) -> None:
        if not len(self):
            self._writer.content += MAGIC
        self._blocks += 1
        content = block.payload.content
        for number in (index, block.begin, block.size, block.payload.method, len(content)):
            self._writer.varint(number)
        self._writer.content += content
        self.raw_bytes += block.raw_bytes

    def cut(self) -> Iterator[bytes]:
        if len(self):
            yield bytes(self._writer.content)
            self._writer, self._blocks, self.raw_bytes = PayloadWriter(), 0, 0

    @property
    def is_full(self) -> bool:
        return self._blocks >= BLOCKS_MAX


def _encode_full(new: WeightsDirectory, chunk_bytes: int) -> Iterator[bytes]:
    cutter = _Cutter()
    for index, spec in enumerate(new.specs):
        large = spec.size_bytes >= chunk_bytes
        if large:
            yield from cutter.cut()
        for block in _full_blocks(new, spec, chunk_bytes):
            cutter.add(index, block)
            if large or cutter.is_full or cutter.raw_bytes >= chunk_bytes:
                yield from cutter.cut()
    yield from cutter.cut()


def _full_blocks(new: WeightsDirectory, spec: TensorSpec, chunk_bytes: int) -> Iterator[_Block]:
    """The content of one entry, cut by its size alone."""
    unit = unit_bytes(spec.dtype)
    limit = min(chunk_bytes, BLOCK_BYTES_MAX, BLOCK_ELEMENTS_MAX * unit)
    for start in range(0, spec.size_bytes, limit):
        size = min(limit, spec.size_bytes - start)
        payload = encode_full(new.read(spec, start, size), spec.dtype)
        yield _Block(start // unit, size // unit, payload, size)


def _encode_delta(
    new: WeightsDirectory, base: WeightsDirectory, chunk_bytes: int
) -> Iterator[bytes]:
    cutter = _Cutter()
    before = {spec.name: spec for spec in base.specs}
    for index, spec in enumerate(new.specs):
        old = before.get(spec.name)
        if old is None or not comparable(spec, old):
            for block in _full_blocks(new, spec, chunk_bytes):
                cutter.add(index, block)
                if cutter.is_full or len(cutter) >= chunk_bytes:
                    yield from cutter.cut()
        elif spec.sha256 != old.sha256:
            for block in _delta_blocks(new, base, spec, old, chunk_bytes):
                grown = len(cutter) + len(block.payload.content)
                if cutter.is_full or grown > chunk_bytes * 5 // 4:
                    yield from cutter.cut()
                cutter.add(index, block)
    yield from cutter.cut()


def _delta_blocks(
    new: WeightsDirectory,
    base: WeightsDirectory,
    spec: TensorSpec,
    old: TensorSpec,
    chunk_bytes: int,
) -> Iterator[_Block]:
    """The changes of one tensor, in blocks of up to about `chunk_bytes`."""
    unit = unit_bytes(spec.dtype)
    span_bytes = min(BLOCK_ELEMENTS_MAX * unit, BLOCK_BYTES_MAX)
    for begin in range(0, spec.size_bytes, span_bytes):
        size_bytes = min(span_bytes, spec.size_bytes - begin)
        after, before = new.read(spec, begin, size_bytes), base.read(old, begin, size_bytes)
        classes = choose_classes(after, before, spec.dtype)
        count = size_bytes // unit
        pieces = max(1, -(-int(classes.bits * count / 8) // chunk_bytes))
        step = -(-count // pieces)
        step += -step % PIECE_ALIGNMENT
        for start in range(0, count, step):
            part = slice(start * unit, min(start + step, count) * unit)
            for block in _split_block(
                after[part], before[part], spec.dtype, classes, chunk_bytes * 3 // 2
            ):
                yield block._replace(begin=begin // unit + start + block.begin)


def _split_block(
    after: Array, before: Array, dtype: str, classes: Classes, most_bytes: int
) -> Iterator[_Block]:
    """One block, or halves of halves where it is larger than expected."""
    payload = encode_delta(after, before, dtype, classes)
    if payload is None:
        return
    unit = unit_bytes(dtype)
    count = len(after) // unit
    if len(payload.content) <= most_bytes or count <= PIECE_ALIGNMENT:
        yield _Block(0, count, payload)
        return
    half = -(-count // (2 * PIECE_ALIGNMENT)) * PIECE_ALIGNMENT
    for start in (0, half):
        part = slice(start * unit, (start + half) * unit)
        for block in _split_block(after[part], before[part], dtype, classes, most_bytes):
            yield block._replace(begin=start + block.begin)


@dataclass(frozen=True, slots=True)
class _Told:
    """A block's header, within bounds, and its payload unread."""

    index: int
    start: int
    count: int
    method: int
    payload: memoryview


class Patcher:
    """Makes the directory `output` of the version `specs`, from chunks and a base, which may be
    None.

    `base_state` is compared with the base before anything is written; a difference raises
    `WeightsMismatch`. Entries that the base has, or that no chunk holds, are copied. `output` must
    not exist, or be empty; the caller deletes it after an error.
    """

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        base: WeightsDirectory | None,
        output: Path,
        *,
        base_state: bytes | None = None,
    ) -> None:
        self._specs = specs
        self._base = base
        self._old = {} if base is None else {spec.name: spec for spec in base.specs}
        if base_state is not None:
            _check_base(base, base_state)
        self._writer = WeightsWriter(output, specs)
        self._lock = threading.Lock()
        self._told: list[list[tuple[int, int]]] = [[] for _ in specs]  # begins and ends, sorted
        self._ranges = 0

    def apply(self, chunk: bytes) -> None:
        """Patch one chunk in: any order, any thread, twice if need be.

        Raises `RemoteProtocolError` for a chunk that is wrong, `StorageFailed` for a disk that is.
        """
        for told in read_chunk(chunk, self._specs):
            spec = self._specs[told.index]
            if self._is_same(spec) or not self._claim(told):
                continue
            try:
                self._patch(spec, told)
            except BaseException:  # not told after all: another try may come
                with self._lock:
                    self._told[told.index].remove((told.start, told.start + told.count))
                    self._ranges -= 1
                raise

    def _is_same(self, spec: TensorSpec) -> bool:
        old = self._old.get(spec.name)
        return old is not None and comparable(spec, old) and spec.sha256 == old.sha256

    def _claim(self, told: _Told) -> bool:
        """True if this block is new; one that overlaps an earlier one is malformed."""
        ranges, mine = self._told[told.index], (told.start, told.start + told.count)
        with self._lock:
            at = bisect_left(ranges, mine)
            if at < len(ranges) and ranges[at] == mine:
                return False
            if at and ranges[at - 1][1] > mine[0]:
                raise malformed("blocks overlap")
            if at < len(ranges) and ranges[at][0] < mine[1]:
                raise malformed("blocks overlap")
            if self._ranges >= RANGES_MAX:
                raise malformed("a version has too many blocks")
            ranges.insert(at, mine)
            self._ranges += 1
            return True

    def _patch(self, spec: TensorSpec, told: _Told) -> None:
        unit = unit_bytes(spec.dtype)
        before = None
        old = self._old.get(spec.name)
        if (
            Method(told.method).needs_base
            and self._base is not None
            and old is not None
            and comparable(spec, old)
        ):
            before = self._base.read(old, told.start * unit, told.count * unit)
        units = decode_block(told.method, told.payload, spec.dtype, told.count, before)
        self._writer.write(spec, told.start * unit, units)

    def finish(self) -> WeightsDirectory:
        """Copy what no chunk held, verify every entry, flush all to disk.

        Raises `WeightsMismatch` with the first incomplete or different entry, `RemoteProtocolError`
        for headers that list other tensors, `StorageFailed`.
        """
        made = WeightsDirectory(self._writer.path, self._specs)
        for index, spec in enumerate(self._specs):
            self._copy_rest(index, spec)
        wrong = made.first_difference()
        if wrong is not None:
            raise WeightsMismatch(f"{wrong.name!r} came out with another hash", wrong.name)
        for spec in self._specs:
            if spec.dtype == HEADER_DTYPE:
                header = made.read(spec, 0, spec.size_bytes).tobytes()
                of_file = (each for each in self._specs if each.file == spec.file)
                check_header(header, of_file, spec.file)
        self._writer.sync()
        return made

    def _copy_rest(self, index: int, spec: TensorSpec) -> None:
        old, unit = self._old.get(spec.name), unit_bytes(spec.dtype)
        ends = [(begin * unit, end * unit) for begin, end in self._told[index]]
        at = 0
        for begin, end in [*ends, (spec.size_bytes, spec.size_bytes)]:
            if begin > at and (self._base is None or old is None or not comparable(spec, old)):
                raise WeightsMismatch(f"{spec.name!r} has not come whole", spec.name)
            for start in range(at, begin, READ_BYTES):
                assert self._base is not None
                assert old is not None
                size_bytes = min(READ_BYTES, begin - start)
                self._writer.write(spec, start, self._base.read(old, start, size_bytes))
            at = end


def _check_base(base: WeightsDirectory | None, state: bytes) -> None:
    if base is None:
        raise WeightsMismatch("a delta needs a base, there is none")
    has = state_of(base.specs)
    if has != state:
        raise WeightsMismatch(
            f"the delta is against state {state.hex()[:16]}, {base.path} has {has.hex()[:16]}"
        )


def read_chunk(chunk: bytes, specs: tuple[TensorSpec, ...]) -> list[_Told]:
    """The blocks of a chunk of the version `specs`, checked but for their payloads.

    Raises `RemoteProtocolError`. Blocks of one chunk do not overlap: applying one takes no more
    than the version's own size.
    """
    if len(chunk) > CHUNK_BYTES_MAX:
        raise RemoteProtocolError(Reject.OVERSIZE, f"a chunk of {len(chunk)} bytes")
    reader = PayloadReader(memoryview(chunk))
    if reader.take(len(MAGIC)) != MAGIC:
        raise malformed("it begins with other bytes")
    blocks: list[_Told] = []
    while not reader.at_end():
        if len(blocks) == BLOCKS_MAX:
            raise malformed("too many blocks")
        index, start, count, method, size_bytes = (
            reader.varint(most)
            for most in (
                min(len(specs), ENTRIES_MAX) - 1,
                VERSION_BYTES_MAX,
                BLOCK_ELEMENTS_MAX,
                max(Method),
                len(chunk),
            )
        )
        unit = unit_bytes(specs[index].dtype)
        if not count or (start + count) * unit > specs[index].size_bytes:
            raise malformed("a block is outside of its entry")
        if count * unit > BLOCK_BYTES_MAX:
            raise malformed("a block is too large")
        blocks.append(_Told(index, start, count, method, reader.take(size_bytes)))
    in_order = sorted(blocks, key=lambda told: (told.index, told.start))
    for one, other in pairwise(in_order):
        if one.index == other.index and one.start + one.count > other.start:
            raise malformed("blocks overlap")
    return blocks
