"""Compressed streams of bytes and of small numbers, inside a block.

What is written here is read on other machines, from bytes that their senders chose. So a reader
knows beforehand how many bytes or numbers must come, and takes exactly these: no length in a stream
decides how much memory is set aside, and a frame that would grow larger is refused unread.

Numbers that are mostly small go as symbols of 1, 2, 4 or 8 bits, several to a byte, and the largest
symbol announces that the rest of the number is in another stream. zstd codes bytes with Huffman's
code, of which a byte takes at least one bit: packing makes bytes that carry several, and what it
wastes on each byte is spread over more numbers. Numbers too large for that give up their lowest
bits, which are noise, to plain bit planes.
"""

import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from swarm.errors import Reject, RemoteProtocolError

ZSTD_LEVEL = 1
"""Higher levels look for repetitions, which these streams have none of: slower, and no smaller."""
WINDOW_BYTES_MAX = 8 << 20
"""What a frame may ask the decompressor to keep."""
VARINT_BYTES_MAX = 9
SAMPLE = 1 << 15
"""How many numbers the width of symbols is tried on."""
MEAN_MAX = 32
"""Numbers that are larger on average than this many symbols of 8 bits would like, lose low bits."""

Array = NDArray[Any]

_of_thread = threading.local()  # a compressor serves one thread at a time


def malformed(detail: str) -> RemoteProtocolError:
    """The error for whatever is wrong with a chunk's bytes."""
    return RemoteProtocolError(Reject.MALFORMED, f"a chunk of weights: {detail}")


def compress(content: Any) -> bytes:
    """One zstd frame, which states how large its content is."""
    found: zstandard.ZstdCompressor | None = getattr(_of_thread, "compressor", None)
    if found is None:
        found = _of_thread.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return found.compress(content)


class Writer:
    """Gathers the payload of a block."""

    def __init__(self) -> None:
        self.content = bytearray()

    def varint(self, number: int) -> None:
        """Seven bits to a byte, lowest first."""
        while number > 0x7F:
            self.content.append(number & 0x7F | 0x80)
            number >>= 7
        self.content.append(number)

    def stream(self, content: Array, packed: bytes | None = None) -> None:
        """The bytes of an array, compressed (`packed`, where that was done already) or as they
        are."""
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
        packed = compress(data) if packed is None else packed
        smaller = len(packed) < len(data)
        kept = packed if smaller else data
        self.varint(len(kept) << 1 | smaller)
        self.content += kept

    def symbols(self, numbers: Array) -> None:
        """Unsigned numbers, mostly small. How many there are is not written."""
        if not len(numbers):
            return
        mean = float(numbers.mean(dtype=np.float64))
        shift = max(0, int(mean / MEAN_MAX).bit_length())
        high = numbers >> numbers.dtype.type(shift) if shift else numbers
        code, parts = _best_width(high, mean)
        self.varint(shift << 2 | code)
        for bit in range(shift):
            plane = (numbers >> numbers.dtype.type(bit)) & numbers.dtype.type(1)
            self.content += np.packbits(plane.astype(np.uint8), bitorder="little").data
        for part in parts:
            self.stream(part)


def _best_width(numbers: Array, mean: float) -> tuple[int, list[Array]]:
    """The code of the symbols' width (1 << code bits), and the streams under it."""
    codes = [0, 1, 2] if mean < 0.5 else [1, 2] if mean < 3 else [2, 3] if mean < 16 else [3]
    if len(codes) > 1:
        sample = numbers[:SAMPLE]
        sizes = [sum(len(compress(part.data)) for part in _split(sample, code)) for code in codes]
        codes = [codes[sizes.index(min(sizes))]]
    return codes[0], _split(numbers, codes[0])


def _split(numbers: Array, code: int) -> list[Array]:
    """Packed symbols, then what is over them (bytes), then what is over those (whole numbers)."""
    width = 1 << code
    last = (1 << width) - 1
    symbols = np.minimum(numbers, last).astype(np.uint8)
    parts = [_pack(symbols, width)]
    over = numbers[symbols == last] - numbers.dtype.type(last)
    if len(over):
        parts.append(np.minimum(over, 255).astype(np.uint8))
        wide = over[over >= 255] - numbers.dtype.type(255)
        if len(wide):
            parts.append(wide.astype("<u8"))
    return parts


def _pack(symbols: Array, width: int) -> Array:
    """Symbols of `width` bits into bytes, the first lowest."""
    if width == 8:
        return symbols
    if width == 1:
        return np.packbits(symbols, bitorder="little")
    each = 8 // width
    missing = -len(symbols) % each
    if missing:
        symbols = np.concatenate([symbols, np.zeros(missing, np.uint8)])
    packed = symbols[0::each].copy()
    for place in range(1, each):
        packed |= symbols[place::each] << np.uint8(place * width)
    return packed


def _unpack(packed: Array, width: int, count: int) -> Array:
    """The other way; new memory, or `packed` itself."""
    if width == 8:
        return packed
    if width == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    each = 8 // width
    symbols = np.empty((len(packed), each), np.uint8)
    for place in range(each):
        np.right_shift(packed, place * width, out=symbols[:, place])
    symbols &= np.uint8((1 << width) - 1)
    return symbols.reshape(-1)[:count]


class Reader:
    """Reads a payload from anywhere. Raises `RemoteProtocolError` for all that is wrong with it."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def take(self, size_bytes: int) -> memoryview:
        """The next bytes, where they lie."""
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
        """Whether everything was taken."""
        return self._at == len(self._content)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._content):
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

    def symbols(self, count: int, most: int) -> Array:
        """`count` numbers of 0 to `most`, which is below 2^63; as uint32 where that holds them."""
        dtype = np.dtype(np.uint32 if most < 1 << 31 else np.uint64)
        if not count:
            return np.empty(0, dtype)
        marked = self.varint(63 << 2 | 3)
        shift, width = marked >> 2, 1 << (marked & 3)
        if most >> shift == 0 and shift:
            raise malformed("symbols are shifted out of their range")
        planes = [self.take(-(-count // 8)) for _ in range(shift)]
        packed = self.stream(-(-count * width // 8))
        symbols = _unpack(packed, width, count)
        numbers = symbols.astype(dtype)
        self._add_rest(numbers, np.flatnonzero(symbols == (1 << width) - 1), most)
        if shift:
            if int(numbers.max()) > most >> shift:
                raise malformed("a number is too large")
            numbers <<= dtype.type(shift)
            for bit, plane in enumerate(planes):
                bits = np.unpackbits(np.frombuffer(plane, np.uint8), count=count, bitorder="little")
                numbers |= bits.astype(dtype) << dtype.type(bit)
        if int(numbers.max()) > most:
            raise malformed("a number is too large")
        return numbers

    def _add_rest(self, numbers: Array, over: Array, most: int) -> None:
        """To those symbols that announce it, what is over them."""
        if not len(over):
            return
        rest = self.stream(len(over))
        numbers[over] += rest
        wide = over[rest == 255]
        if len(wide):
            more = self.stream(8 * len(wide)).view("<u8")
            if int(more.max()) > most:
                raise malformed("a number is too large")
            numbers[wide] += more.astype(numbers.dtype)


def _decompress(frame: memoryview, size_bytes: int) -> bytes:
    """A zstd frame of exactly `size_bytes`; its own claim is compared before memory is taken."""
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
