"""Counts the fields of a protobuf message before it is parsed.

A field of two bytes may take a hundred in memory: half a million empty ones, 1 MB on the wire, take
0.25 s and 60 MB.
"""

from collections.abc import Mapping
from typing import Final

from swarm.errors import Reject, RemoteProtocolError

Within = Mapping[int, "Within"]
"""Numbers of the fields that hold messages, nested."""

VARINT, BYTES = 0, 2  # kinds of fields
FIXED_BYTES: Final = {1: 8, 5: 4}  # sizes of the other kinds
VARINT_BYTES_MAX = 10


def count_fields(data: memoryview, within: Within, fields_max: int) -> int:
    """Count fields, nested ones included. Stops after `fields_max`. RemoteProtocolError: too many
    (`FLOOD`), or no valid message."""
    at, end, count = 0, len(data), 0
    while at < end:
        count += 1
        if count > fields_max:
            raise RemoteProtocolError(Reject.FLOOD, f"more than {fields_max} fields")
        tag = data[at]
        tag, at = (tag, at + 1) if tag < 0x80 else _varint(data, at)  # most are of one byte
        kind = tag & 7
        if kind == BYTES:
            length, at = _varint(data, at)
            stop = at + length
            if stop > end:
                raise RemoteProtocolError(Reject.MALFORMED, "a field is cut short")
            inner = within.get(tag >> 3)
            if inner is not None and length:
                count += count_fields(data[at:stop], inner, fields_max - count)
            at = stop
        elif kind == VARINT:
            _, at = _varint(data, at)
        elif kind in FIXED_BYTES:
            at += FIXED_BYTES[kind]
        else:
            raise RemoteProtocolError(Reject.MALFORMED, f"fields of kind {kind}")
    if at > end:
        raise RemoteProtocolError(Reject.MALFORMED, "a field is cut short")
    return count


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number and the offset after it."""
    value = shift = 0
    for position in range(at, min(at + VARINT_BYTES_MAX, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    raise RemoteProtocolError(Reject.MALFORMED, "a number without an end")
