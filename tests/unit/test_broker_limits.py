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
    Header,
    Pace,
    TooMuch,
    clients_of,
)
from swarm.limits.address_blocks import path_of
from swarm.limits.bounded_table import BoundedTable
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
    clients: BoundedTable[str, None] = BoundedTable(
        CLIENTS_MAX, limit_of=clients_of, newest_first=True
    )

    def connect(name: str, count: int, ip: str) -> int:
        for number in range(count):
            clients.put(f"{name} {number}", None, path_of(ip.format(number & 255, number >> 8)))
        return sum(each.startswith(name) for each in clients)

    assert connect("greedy", 99, "9.9.9.9") == CLIENTS_PER_BLOCK_MAX
    assert connect("neighbour", 3, "9.9.9.{}") == 3
    assert connect("own", 999, "127.0.0.1") == CLIENTS_PER_PRIVATE_BLOCK_MAX
    others = (CLIENTS_MAX - CLIENTS_PER_BLOCK_MAX) // 2  # as many as the two networks can have
    assert connect("other", 999, "9.8.{}.{}") == others
    assert connect("elsewhere", 1, "8.8.8.8") == 1
    assert len(clients) == CLIENTS_MAX


@pytest.mark.parametrize(("size", "per_s"), [(1, PACKETS_PER_S_MAX), (99_999, 42.0)])
def test_who_sends_fast_is_read_slowly(size: int, per_s: float) -> None:
    pace, now_s, sent = Pace(0.0), 0.0, 0
    while now_s < 20.0:
        now_s += pace.spend(size, now_s)
        sent += 1
    assert sent == pytest.approx(21 * per_s, rel=0.02)
    assert sent * size <= 21 * BYTES_PER_S_MAX + size
