"""What a client of the embedded broker may have, judged before it is held."""

import pytest

from node.monitor.broker_limits import (
    BYTES_PER_S_MAX,
    CLIENTS_MAX,
    CLIENTS_PER_BLOCK_MAX,
    CLIENTS_PER_PRIVATE_BLOCK_MAX,
    CONNECT_BYTES_MAX,
    CONTROL_BYTES_MAX,
    PACKETS_PER_S_MAX,
    PUBLISH_BYTES_MAX,
    ClientSlots,
    Header,
    Pace,
    TooMuch,
)
from swarm.telemetry.mqtt import PACKET_BYTES_MAX


def header(kind: int, size: int) -> Header:
    made = Header()
    made.take(kind << 4)
    while True:
        size, low = size >> 7, size & 0x7F
        made.take(low | (0x80 if size else 0))
        if not size:
            return made


@pytest.mark.parametrize(
    ("kind", "most"),
    [(3, PUBLISH_BYTES_MAX), (1, CONNECT_BYTES_MAX), (8, CONTROL_BYTES_MAX), (15, 4_096)],
)
def test_a_packet_is_judged_by_its_header(kind: int, most: int) -> None:
    for size in (0, 127, 128, most):
        made = header(kind, size)
        assert (made.packet_type, made.body_bytes) == (kind, size)
    for size in (most + 1, 2**28 - 1):
        with pytest.raises(TooMuch, match=str(size)):
            header(kind, size)


def test_a_length_has_an_end() -> None:
    made = Header()
    for byte in b"\x30" + b"\x80" * 3:
        made.take(byte)
    with pytest.raises(TooMuch, match="no end"):
        made.take(0x80)


def test_what_nodes_send_fits() -> None:
    assert PACKET_BYTES_MAX < PUBLISH_BYTES_MAX


def test_no_address_block_has_all_places() -> None:
    places = ClientSlots()
    assert sum(places.enter(f"9.9.9.{ip}") for ip in range(99)) == CLIENTS_PER_BLOCK_MAX
    own = sum(places.enter(f"127.0.0.{ip % 250}") for ip in range(999))
    assert own == CLIENTS_PER_PRIVATE_BLOCK_MAX
    others = sum(places.enter(f"9.8.{ip & 255}.{ip >> 8}") for ip in range(999))
    assert others == CLIENTS_MAX - CLIENTS_PER_BLOCK_MAX - CLIENTS_PER_PRIVATE_BLOCK_MAX
    assert places.refused == 99 + 999 + 999 - CLIENTS_MAX
    places.leave("127.0.0.1")
    assert places.enter("8.8.8.8")
    assert not places.enter("127.0.0.1")


@pytest.mark.parametrize(("size", "per_s"), [(1, PACKETS_PER_S_MAX), (99_999, 42.0)])
def test_who_sends_fast_is_read_slowly(size: int, per_s: float) -> None:
    pace, now_s, sent = Pace(0.0), 0.0, 0
    while now_s < 20.0:
        now_s += pace.spend(size, now_s)
        sent += 1
    assert sent == pytest.approx(21 * per_s, rel=0.02)
    assert sent * size <= 21 * BYTES_PER_S_MAX + size
