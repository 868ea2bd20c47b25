"""Fuzz target: multistream-select, from both ends, against a second reader of the same bytes.

An input is a mode, how the bytes are cut into pieces, and the bytes:

    0  what the end says that asks
    1  what the end answers that is asked

Both ends find what the reference finds, read no byte beyond it, and collect no more than a line.
"""

from collections.abc import Coroutine
from random import Random
from typing import Any

from libp2p.io.exceptions import ConnectionClosedError
from libp2p.utils import encode_delim

from swarm.errors import RemoteProtocolError, RequestRefused
from swarm.transport.libp2p.negotiation import (
    LINE_BYTES_MAX,
    MULTISTREAM,
    NOT_SERVED,
    Reader,
    Responder,
    agree,
    proposal,
)
from tests.fuzz.rig import pieces

INPUT_BYTES_MAX = 4_096
HEAD_BYTES = 2
MODES = 2
OFFER, ANSWER = range(MODES)
PROTOCOL = "/noise"
TRIES = 8
AHEAD = (0, 1, 64, 4_096)
SELECT = MULTISTREAM.encode()

Found = tuple[str, int]
"""What it comes to, and how many bytes were needed to know."""


class Wire:
    """Gives out the input and keeps what is written. Nothing of it waits."""

    def __init__(self, data: bytes, cut: int) -> None:
        self._pieces = pieces(data, cut)
        self._rest = b""
        self.given = 0
        self.written = b""

    async def read(self, n: int | None = None) -> bytes:
        self._rest = self._rest or next(self._pieces, b"")
        count = len(self._rest) if n is None else n
        data, self._rest = self._rest[:count], self._rest[count:]
        self.given += len(data)
        return data

    async def write(self, data: bytes) -> None:
        self.written += data


def done(body: Coroutine[Any, Any, str | None]) -> str | None:
    """Run what never waits."""
    try:
        body.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits for something")


def check(data: bytes) -> None:
    """Judge one input.

    Raises:
        Exception: the two readers differ, or something else comes out than may.
    """
    if len(data) < HEAD_BYTES:
        return
    mode, cut, said = data[0] % MODES, data[1], data[HEAD_BYTES:]
    ahead = AHEAD[cut % len(AHEAD)]
    wire = Wire(said, cut)
    reader = Reader(wire, ahead)
    body = _offer(reader, wire) if mode == OFFER else _agree(reader)
    try:
        outcome = done(body)
    except RemoteProtocolError:
        outcome = "nonsense"
    except RequestRefused:
        outcome = "refused"
    except ConnectionClosedError:
        outcome = "closed"
    expected, needed = _expected_offer(said) if mode == OFFER else _expected_answer(said)
    assert outcome == expected, f"{outcome}, not {expected}"
    used = wire.given - len(reader.rest)
    assert used <= needed, f"{used} bytes taken, {needed} needed"
    assert wire.given <= needed + ahead, f"{wire.given} bytes read"
    assert len(wire.written) <= (TRIES + 1) * (LINE_BYTES_MAX + 2)


async def _offer(reader: Reader, wire: Wire) -> str | None:
    offer = Responder(reader, wire.write)
    choice = await offer.choice({PROTOCOL}, TRIES)
    await offer.flush()
    return choice or "nothing"


async def _agree(reader: Reader) -> str | None:
    await agree(reader, PROTOCOL)
    return "agreed"


# --- the reference ----------------------------------------------------------------------------


def _line(data: bytes, at: int) -> tuple[bytes | str, int]:
    """A line and where the next begins; or what is wrong, and how far one must read to know."""
    if len(data) <= at:
        return "closed", at
    length, size = data[at] & 127, 1
    if data[at] & 128:
        if len(data) <= at + 1:
            return "closed", at + 1
        length, size = length + 128 * (data[at + 1] & 127), 2
        if data[at + 1] & 128:
            return "nonsense", at + 2
    if not 1 <= length <= 1_024:
        return "nonsense", at + size
    end = at + size + length
    return (data[at + size : end], end) if len(data) >= end else ("closed", len(data))


def _said(line: bytes) -> str:
    text = line.decode(errors="replace")
    return text[:-1] if text.endswith("\n") else text


def _expected_offer(data: bytes) -> Found:
    line, at = _line(data, 0)
    if isinstance(line, str):
        return line, at
    if _said(line) != MULTISTREAM:
        return "nonsense", at
    for tried in range(TRIES):
        line, at = _line(data, at)
        if isinstance(line, str):
            return ("nothing" if line == "nonsense" and tried else line), at
        if _said(line) == PROTOCOL:
            return PROTOCOL, at
    return "nothing", at


def _expected_answer(data: bytes) -> Found:
    line, at = _line(data, 0)
    if isinstance(line, str):
        return line, at
    if _said(line) != MULTISTREAM:
        return "nonsense", at
    line, at = _line(data, at)
    if isinstance(line, str):
        return line, at
    known = {PROTOCOL: "agreed", NOT_SERVED: "refused"}
    return known.get(_said(line), "nonsense"), at


# --- seeds and mutation -----------------------------------------------------------------------


def seeds() -> dict[str, bytes]:
    """Inputs to start from, by name."""
    select, no = encode_delim(SELECT), encode_delim(b"/no")
    long = bytes([0x80, 0x08]) + bytes(1_023) + b"\n"
    offers = {
        "offer": proposal(PROTOCOL),
        "offer-after-others": select + 3 * no + encode_delim(PROTOCOL.encode()) + b"more",
        "offer-too-many": select + 9 * no,
        "offer-ls": select + encode_delim(b"ls"),
        "offer-long": select + long + encode_delim(PROTOCOL.encode()),
        "offer-too-long": select + b"\x81\x08" + bytes(1_025),
        "offer-length-bomb": b"\xff\xff\xff\xff\x7f",
        "offer-nothing": b"\x00",
        "offer-no-text": select + b"\x03\xff\xfe\n",
        "offer-no-line-end": b"\x12" + SELECT[:18],
        "offer-cut": select[:7],
    }
    answers = {
        "answer": proposal(PROTOCOL) + b"more",
        "answer-na": select + encode_delim(b"na"),
        "answer-other": select + no,
        "answer-length-bomb": select + b"\xff" * 9,
    }
    found = {name: bytes([OFFER, 0]) + data for name, data in offers.items()}
    found |= {f"{name}-cut-up": bytes([OFFER, 1]) + data for name, data in offers.items()}
    return found | {name: bytes([ANSWER, 3]) + data for name, data in answers.items()}


def mutate(data: bytes, random: Random) -> bytes | None:
    """Now and then put a line in, or another cut."""
    if len(data) <= HEAD_BYTES or random.random() < 0.5:
        return None
    at = random.randrange(HEAD_BYTES, len(data) + 1)
    line = random.choice((SELECT, PROTOCOL.encode(), b"na", b"ls", b"/no", b""))
    head = bytes([data[0], random.randrange(8)])
    return head + data[HEAD_BYTES:at] + encode_delim(line) + data[at:]
