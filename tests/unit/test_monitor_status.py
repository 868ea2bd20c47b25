import json
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from node.observe import status
from node.observe.records import PeerStatus, StatusSnapshot
from node.observe.status import (
    POINTER_NAME,
    SOCKET_NAME,
    fetch_status,
    render_status,
    serve_status,
    snapshot_json,
)
from node.observe.text_format import WIDTH_COLUMNS
from node.system.bounded_server import CLIENTS_MAX, CROWDED, LEFT, SLOW
from swarm.errors import ConfigError, RequestTimeout
from tests.support import run
from tests.unit.monitor_records import PEER_B, snapshot


async def fetched(data_dir: Path) -> StatusSnapshot:
    return await trio.to_thread.run_sync(fetch_status, data_dir)


def serving(
    data_dir: Path,
    body: Any,
    answer: StatusSnapshot | None = None,
    unanswered: Counter[str] | None = None,
) -> Any:
    """Run `body(socket path)` while a node answers on `data_dir`."""
    counted = Counter() if unanswered is None else unanswered

    async def main() -> Any:
        async with trio.open_nursery() as nursery:
            path = await nursery.start(
                serve_status, data_dir, lambda: answer or snapshot(), counted
            )
            result = await body(path)
            nursery.cancel_scope.cancel()
        return result

    return run(main)


def test_the_answer_is_the_snapshot(tmp_path: Path) -> None:
    async def body(path: Path) -> StatusSnapshot:
        assert path == tmp_path / SOCKET_NAME
        assert os.stat(path).st_mode & 0o777 == 0o600
        return await fetched(tmp_path)

    answer = snapshot(own_reward=None, tokens_per_s=float("inf"), notes=("ü\n",))
    assert serving(tmp_path, body, answer) == answer
    assert not (tmp_path / SOCKET_NAME).exists()


def test_many_ask_one_after_the_other(tmp_path: Path) -> None:
    async def body(_: Path) -> None:
        for _ in range(3 * CLIENTS_MAX):
            assert await fetched(tmp_path) == snapshot()

    serving(tmp_path, body)


def test_nobody_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no node is running on .*swarm-node join"):
        fetch_status(tmp_path)


def test_a_socket_left_by_a_killed_node_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / SOCKET_NAME))
    with pytest.raises(ConfigError, match="no node is running"):
        fetch_status(tmp_path)

    async def body(_: Path) -> StatusSnapshot:
        return await fetched(tmp_path)

    assert serving(tmp_path, body) == snapshot()


def test_a_second_node_does_not_take_the_socket_of_a_live_one(tmp_path: Path) -> None:
    async def body(_: Path) -> StatusSnapshot:
        with pytest.raises(ConfigError, match="runs on it already"):
            await serve_status(tmp_path, snapshot, Counter())
        return await fetched(tmp_path)

    assert serving(tmp_path, body) == snapshot()


def test_a_path_too_long_for_a_socket_goes_elsewhere_and_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "r"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)

    async def body(path: Path) -> StatusSnapshot:
        assert len(os.fsencode(path)) <= status.SOCKET_PATH_BYTES_MAX
        assert not path.is_relative_to(deep)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert (deep / POINTER_NAME).read_text().strip() == str(path)
        return await fetched(deep)

    assert serving(deep, body) == snapshot()
    assert not (deep / POINTER_NAME).exists()


def test_a_shared_directory_that_others_may_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as shared:  # its path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", shared)
        (Path(shared) / f"swarm-node-{os.getuid()}").mkdir(mode=0o755)
        with pytest.raises(ConfigError, match="not private"):
            run(serve_status, deep, snapshot, Counter())


LARGE = snapshot(notes=tuple("n" * 1_000 for _ in range(2_000)))  # no socket holds it unread


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60.0):
        while not condition():  # noqa: ASYNC110  the other side announces nothing
            await trio.sleep(0.01)


def test_who_comes_when_all_places_are_taken_is_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "ANSWER_TIMEOUT_S", 1_000.0)
    unanswered: Counter[str] = Counter()

    async def body(path: Path) -> None:
        stuck = [await trio.open_unix_socket(path) for _ in range(CLIENTS_MAX)]
        for stream in stuck:
            await stream.receive_some(1)  # so it has its place
        with pytest.raises(ConfigError):
            await fetched(tmp_path)
        assert unanswered == {CROWDED: 1}
        for stream in stuck:
            await stream.aclose()
        await until(lambda: unanswered[LEFT] == CLIENTS_MAX)
        assert await fetched(tmp_path) == LARGE

    serving(tmp_path, body, LARGE, unanswered)


def test_who_never_reads_loses_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ANSWER_TIMEOUT_S", 0.05)
    unanswered: Counter[str] = Counter()

    async def body(path: Path) -> None:
        for number in range(1, 2 * CLIENTS_MAX):
            async with await trio.open_unix_socket(path):
                await until(lambda number=number: unanswered[SLOW] == number)  # type: ignore[misc]

    serving(tmp_path, body, LARGE, unanswered)
    assert unanswered == {SLOW: 2 * CLIENTS_MAX - 1}


def test_clients_that_leave_at_once_harm_nobody(tmp_path: Path) -> None:
    unanswered: Counter[str] = Counter()

    async def body(path: Path) -> StatusSnapshot:
        for _ in range(2 * CLIENTS_MAX):
            await (await trio.open_unix_socket(path)).aclose()
        await until(lambda: unanswered.total() == 2 * CLIENTS_MAX)
        return await fetched(tmp_path)

    assert serving(tmp_path, body, LARGE, unanswered) == LARGE
    assert unanswered.keys() <= {LEFT, CROWDED}


def test_a_node_that_hangs_is_told_apart_from_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / SOCKET_NAME))
        hanging.listen(1)
        with pytest.raises(RequestTimeout, match="did not answer"):
            fetch_status(tmp_path, timeout_s=0.1)


@pytest.mark.parametrize("answer", [b"", b"{}", b"nonsense", b'{"peer_id": 3}'])
def test_an_answer_of_another_version_is_one_clear_line(tmp_path: Path, answer: bytes) -> None:
    async def main() -> None:
        listeners = [trio.SocketListener(_listening(tmp_path / SOCKET_NAME))]

        async def reply(stream: trio.SocketStream) -> None:
            await stream.send_all(answer)
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, reply, listeners)
            with pytest.raises(ConfigError, match="version"):
                await fetched(tmp_path)
            nursery.cancel_scope.cancel()

    run(main)


def _listening(path: Path) -> trio.socket.SocketType:
    raw = socket.socket(socket.AF_UNIX)
    raw.bind(str(path))
    raw.listen(1)
    return trio.socket.from_stdlib_socket(raw)


def test_the_view_fits_a_terminal_and_says_what_matters() -> None:
    text = render_status(snapshot(notes=("pool is full", "one peer only")))
    lines = text.splitlines()
    link = f"{snapshot().addresses[0]}/run/{snapshot().run_id}"
    assert lines[-1] == f"  swarm-node join {link}"  # whole, to be copied
    assert max(len(line) for line in lines[:-1]) <= WIDTH_COLUMNS
    assert lines[:2] == ["! pool is full", "! one peer only"]
    for part in (
        "training, round 12",
        "61.0 % passed, 40.0 % at the start (+21.0 points)",
        "3 of 4 wanted",
        "36 groups accepted, 10 rejected",
        PEER_B[-8:],
        "/ip4/192.0.2.7/tcp/4001",
    ):
        assert part in text
    assert text.index("malformed") < text.index("expired")  # the most frequent reason first


def test_an_address_is_no_way_into_a_private_swarm() -> None:
    text = render_status(snapshot(), private=True)
    assert text.splitlines()[-1] == "others join with what swarm-node invite prints"
    assert "swarm-node join" not in text


def test_a_node_that_just_started_can_be_viewed() -> None:
    text = render_status(
        snapshot(peers=(), held_out_passed=None, held_out_first=None, own_reward=None, rejected={})
    )
    assert "no peers connected" in text
    assert "not evaluated yet" in text


def test_what_peers_call_themselves_cannot_steer_the_terminal() -> None:
    evil = PeerStatus("x\x1b[2J", ("/ip4/\x1b]0;owned\x07/[bold]",), "a\r\nb", 0, 0, {})
    many = tuple(evil for _ in range(200))
    text = render_status(
        snapshot(addresses=(), peers=many, notes=("\x1b[31mred",), rejected={"\x1b[1m": 1})
    )
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "[bold]" in text  # shown, not obeyed
    assert "and 168 more" in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH_COLUMNS


def test_the_json_has_every_field() -> None:
    fields = json.loads(snapshot_json(snapshot()))
    assert set(fields) == set(StatusSnapshot.__dataclass_fields__)
    assert fields["peers"][0]["peer_id"] == PEER_B


def test_a_narrow_terminal_gets_narrow_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    told = render_status(snapshot()).partition("others join with")[0]
    assert max(map(len, told.splitlines())) <= 40
