"""Compressed streams of bytes and of small numbers, inside a block.

Readers run on bytes that strangers chose: they know beforehand how many bytes or numbers must come,
so no length in a stream decides how much memory is taken.

Small numbers go as symbols of 1, 2, 4 or 8 bits, packed into bytes; the largest symbol says that
the rest follows as further symbols. zstd's Huffman code takes at least a bit for a byte, which
packing spreads over several numbers. Large numbers give their lowest bits, which are noise, to
plain bit planes.
"""

import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from swarm.errors import Reject, RemoteProtocolError

# For numbers: hardly more than Huffman's code. Their repetitions are chance and cost more than they
# save: level 1 is up to 6 % larger, and slower; level 3 is larger still.
NUMBERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    chain_log=6,
    search_log=1,
    target_length=0,
    window_log=17,
    write_content_size=1,
)
# For content with repetitions.
TEXT = zstandard.ZstdCompressionParameters.from_level(3, write_content_size=1)
WINDOW_BYTES_MAX = 8 << 20  # that a frame may have the decompressor keep
VARINT_BYTES_MAX = 9
TILE = 1 << 18  # elements worked on at a time: they fit into a cache
SAMPLE = 1 << 15  # numbers on which symbol widths are tried
WASTE = 1.02  # times the entropy: of the widths that cost less, the largest is fastest
TABLE_BYTES = 130  # about the size of a Huffman table
REST_MAX = 4  # rounds of further symbols for one number; what is left is written plainly
PLAIN = 4  # codes from here on are whole numbers of 1, 2, 4 or 8 bytes
MIDDLE_MAX = 22  # above this median, numbers lose low bits so that 8-bit symbols hold most of them

Array = NDArray[Any]

_of_thread = threading.local()  # a compressor serves one thread at a time


def malformed(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reject.MALFORMED, f"a chunk of weights: {detail}")


def compress(content: Any, text: bool = False) -> bytes:
    """One zstd frame, which states the size of its content."""
    name = "text" if text else "numbers"
    found: zstandard.ZstdCompressor | None = getattr(_of_thread, name, None)
    if found is None:
        found = zstandard.ZstdCompressor(compression_params=TEXT if text else NUMBERS)
        setattr(_of_thread, name, found)
    return found.compress(content)


class PayloadWriter:
    def __init__(self) -> None:
        self.content = bytearray()

    def varint(self, number: int) -> None:
        """Seven bits to a byte, lowest first."""
        while number > 0x7F:
            self.content.append(number & 0x7F | 0x80)
            number >>= 7
        self.content.append(number)

    def stream(self, content: Array, text: bool = False) -> None:
        """The bytes of an array, compressed or as they are."""
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
        packed = compress(data, text)
        smaller = len(packed) < len(data)
        kept = packed if smaller else data
        self.varint(len(kept) << 1 | smaller)
        self.content += kept

    def symbols(self, numbers: Array, depth: int = 0) -> None:
        """Unsigned numbers, mostly small. Their count is not written."""
        if not len(numbers):
            return
        if depth == REST_MAX:
            code = PLAIN + (np.min_scalar_type(numbers.max()).itemsize.bit_length() - 1)
            self.varint(code)
            self.stream(numbers.astype(f"<u{1 << code - PLAIN}"))
            return
        middle = float(np.median(numbers[:SAMPLE]))  # a mean would follow a few that are huge
        shift = max(0, int(middle / MIDDLE_MAX).bit_length())
        high = numbers >> numbers.dtype.type(shift) if shift else numbers
        code = 3 if shift else _best_width(high[:SAMPLE], middle, depth)
        self.varint(shift << 3 | code)
        for bit in range(shift):
            plane = (numbers >> numbers.dtype.type(bit)) & numbers.dtype.type(1)
            self.content += np.packbits(plane.astype(np.uint8), bitorder="little").data
        packed, over = _split(high, code)
        self.stream(packed)
        self.symbols(over, depth + 1)


def _best_width(sample: Array, middle: float, least: int) -> int:
    """The code of the best symbol width, which is 1 << code bits; at least `least`."""
    codes = [0, 1, 2] if middle < 1 else [1, 2] if middle < 3 else [2, 3] if middle < 12 else [3]
    codes = [code for code in codes if code >= least] or [least]
    if len(codes) == 1:
        return codes[0]
    wastes = {}
    for code in codes:
        packed, _ = _split(sample, code)
        counts = np.bincount(packed)
        counts = counts[counts > 0]
        entropy = float((counts * np.log2(len(packed) / counts)).sum()) / 8
        wastes[code] = len(compress(packed.data)) / (entropy + TABLE_BYTES)
    good = [code for code in codes if wastes[code] < WASTE]
    return max(good) if good else min(codes, key=lambda code: wastes[code])


def _split(numbers: Array, code: int) -> tuple[Array, Array]:
    """Packed symbols, and the remainders of the numbers that reach the largest symbol."""
    width = 1 << code
    last = numbers.dtype.type((1 << width) - 1)
    packed: Array = np.empty(-(-len(numbers) * width // 8), np.uint8)
    overs = []
    for start in range(0, len(numbers), TILE):
        tile = numbers[start : start + TILE]
        symbols = np.minimum(tile, last).astype(np.uint8)
        # By index: a mask would be gone through with a branch for each element.
        overs.append(tile[np.flatnonzero(symbols == last)] - last)
        begin = start * width // 8
        bits = _pack(symbols, width)
        packed[begin : begin + len(bits)] = bits
    return packed, np.concatenate(overs)


def _pack(symbols: Array, width: int) -> Array:
    """Symbols of `width` bits into bytes, the first lowest. Several bytes are joined at a time."""
    if width == 8:
        return symbols
    if width == 1:
        return np.packbits(symbols, bitorder="little")
    missing = -len(symbols) % (8 // width)
    if missing:
        symbols = np.concatenate([symbols, np.zeros(missing, np.uint8)])
    if width == 4:
        pair = symbols.view("<u2")
        joined: Array = (pair | pair >> np.uint16(4)).astype(np.uint8)
        return joined
    four = symbols.view("<u4")
    four = four | four >> np.uint32(6)
    low: Array = (four | four >> np.uint32(12)).astype(np.uint8)
    return low


def _unpack(packed: Array, width: int, count: int) -> Array:
    """The inverse of `_pack`; new memory, or `packed` itself."""
    if width == 8:
        return packed
    if width == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    if width == 4:
        pair = packed.astype("<u2")
        symbols = (pair | pair << np.uint16(4)) & np.uint16(0x0F0F)
    else:
        four = packed.astype("<u4")
        four |= four << np.uint32(12)
        symbols = (four | four << np.uint32(6)) & np.uint32(0x03030303)
    unpacked: Array = symbols.view(np.uint8)[:count]
    return unpacked


class PayloadReader:
    """Reads a payload from anywhere; raises `RemoteProtocolError` for all faults in it."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def take(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self._content) - self._at:
            raise malformed("cut short")
        self._at += size_bytes
        return self._content[self._at - size_bytes : self._at]

    def varint(self, most: int) -> int:
        """A number of 0 to `most`."""
        number = 0
        for index in range(VARINT_BYTES_MAX):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                break
        else:
            raise malformed("a number has no end")
        if number > most:
            raise malformed(f"{number} where at most {most} can be")
        return number

    def at_end(self) -> bool:
        return self._at == len(self._content)

    def end(self) -> None:
        """Refuse bytes that are left over."""
        if not self.at_end():
            raise malformed("bytes are left over")

    def stream(self, size_bytes: int) -> Array:
        """Exactly `size_bytes` bytes, decompressed; read-only."""
        marked = self.varint(len(self._content) << 1 | 1)
        stored = self.take(marked >> 1)
        if not marked & 1:
            if len(stored) != size_bytes:
                raise malformed("a stream has another size")
            return np.frombuffer(stored, np.uint8)
        return np.frombuffer(_decompress(stored, size_bytes), np.uint8)

    def symbols(self, count: int, most: int, depth: int = 0) -> Array:
        """`count` numbers of 0 to `most`, in the smallest unsigned type that holds `most`."""
        dtype = np.min_scalar_type(most)
        if not count:
            return np.empty(0, dtype)
        marked = self.varint(63 << 3 | 7)
        shift, code = marked >> 3, marked & 7
        if (shift and most >> shift == 0) or (code >= PLAIN) != (depth == REST_MAX):
            raise malformed("symbols out of their range")
        if code >= PLAIN:
            size_bytes = 1 << code - PLAIN
            numbers = self.stream(count * size_bytes).view(f"<u{size_bytes}")
            _check_most(numbers, most)
            return numbers.astype(dtype)
        planes = [self.take(-(-count // 8)) for _ in range(shift)]
        width = 1 << code
        symbols = _unpack(self.stream(-(-count * width // 8)), width, count)
        last = (1 << width) - 1
        if last > most >> shift and int(symbols.max()) > most >> shift:
            raise malformed("a number is too large")
        numbers = symbols.astype(dtype)
        over = np.flatnonzero(symbols == last)
        if len(over):
            rest = self.symbols(len(over), (most >> shift) - last, depth + 1)
            numbers[over] = rest.astype(dtype) + dtype.type(last)
        if shift:
            numbers <<= dtype.type(shift)
            for bit, plane in enumerate(planes):
                bits = np.unpackbits(np.frombuffer(plane, np.uint8), count=count, bitorder="little")
                numbers |= bits.astype(dtype) << dtype.type(bit)
            _check_most(numbers, most)
        return numbers


def _check_most(numbers: Array, most: int) -> None:
    if int(numbers.max()) > most:
        raise malformed("a number is too large")


def _decompress(frame: memoryview, size_bytes: int) -> bytes:
    """The content of a zstd frame; its stated size is checked before memory is taken."""
    found: zstandard.ZstdDecompressor | None = getattr(_of_thread, "decompressor", None)
    if found is None:
        found = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        _of_thread.decompressor = found
    try:
        told = zstandard.get_frame_parameters(frame)
        if told.content_size != size_bytes or told.dict_id:
            raise malformed("a frame has another size")
        content = found.decompress(
            frame, max_output_size=size_bytes, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise malformed(f"a frame is damaged: {str(error)[:80]}") from None
    if len(content) != size_bytes:
        raise malformed("a frame has another size")
    return content
