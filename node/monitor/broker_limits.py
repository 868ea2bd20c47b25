"""What one client may have of the embedded broker, and all of them together. Pure.

Whoever reaches the broker is let in, so that everything a client makes it hold has a bound that is
checked before it is held: a packet by its header, before its body is read.
"""

from typing import Final

from swarm.limits.address_blocks import BLOCK_LENGTH, OriginPath, is_public_network
from swarm.limits.byte_budget import ByteBudget

CONNECT, PUBLISH = 1, 3  # types of packets

CLIENTS_MAX: Final = 512
CLIENTS_PER_BLOCK_MAX: Final = 64  # of public addresses
CLIENTS_PER_PRIVATE_BLOCK_MAX: Final = 256  # a laboratory, or all nodes of one machine; half of all
PUBLISH_BYTES_MAX: Final = 163_840  # of the whole packet; a report has 65,536 at most
CONNECT_BYTES_MAX: Final = 16_384  # with the will in it
CONTROL_BYTES_MAX: Final = 4_096  # of all others
LENGTH_BYTES_MAX: Final = 4  # of a length: as many as MQTT has
BYTES_PER_S_MAX: Final = 4_194_304.0  # of one client; twice that at once
PACKETS_PER_S_MAX: Final = 2_000.0  # likewise


def bytes_max(packet_type: int) -> int:
    """How long the body of a packet may be."""
    by_type = {CONNECT: CONNECT_BYTES_MAX, PUBLISH: PUBLISH_BYTES_MAX}
    return by_type.get(packet_type, CONTROL_BYTES_MAX)


class TooMuch(Exception):
    """A client sends more than it may, or what is no MQTT; the text says what."""


class Header:
    """The fixed header of one packet, byte by byte."""

    def __init__(self) -> None:
        self.raw = bytearray()
        self.body_bytes: int | None = None  # None: not all of the header is there

    @property
    def packet_type(self) -> int:
        """The type in a header that has begun."""
        return self.raw[0] >> 4

    def take(self, byte: int) -> None:
        """The next byte.

        Raises:
            TooMuch: what the header announces is too long, or the header is.
        """
        self.raw.append(byte)
        if len(self.raw) == 1:
            return
        if byte & 0x80:
            if len(self.raw) > LENGTH_BYTES_MAX:
                raise TooMuch("a length that has no end")
            return
        size = sum((each & 0x7F) << 7 * at for at, each in enumerate(self.raw[1:]))
        if size > bytes_max(self.packet_type):
            raise TooMuch(f"a packet of {size} bytes")
        self.body_bytes = size


class Pace:
    """How fast one client may send."""

    def __init__(self, now_s: float) -> None:
        self._bytes = ByteBudget(BYTES_PER_S_MAX, now_s)
        self._packets = ByteBudget(PACKETS_PER_S_MAX, now_s)

    def spend(self, size_bytes: int, now_s: float) -> float:
        """A packet has begun. Returns the seconds until it may be read."""
        return max(self._bytes.spend(size_bytes, now_s), self._packets.spend(1, now_s))


def clients_of(path: OriginPath) -> int | None:
    """How many clients of an origin there may be at once."""
    if len(path) != BLOCK_LENGTH:
        return None
    return CLIENTS_PER_BLOCK_MAX if is_public_network(path[-1]) else CLIENTS_PER_PRIVATE_BLOCK_MAX
