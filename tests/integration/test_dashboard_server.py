"""The page's server on a real socket: what it sends, to whom, how many, and what it refuses."""

import json
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest
import trio

from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.telemetry.dashboard import page_server
from swarm.telemetry.dashboard.page_server import (
    ACTION_BYTES_MAX,
    CONNECTIONS_MAX,
    POLICY,
    STREAMS_MAX,
    Board,
    Guarded,
    listen_on,
    page_files,
    serve,
    serve_board,
)
from swarm.telemetry.dashboard.page_state import ReportSource
from swarm.telemetry.fleet_view import Watch
from tests.dashboard_samples import NOW_S, signed

pytestmark = pytest.mark.integration
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")

WAIT_S = 30.0  # a busy machine is no failure
PAUSE_S = 0.02
PAGE_BYTES_MAX = 68_000
TOKEN = "sixteen letters or more"


@asynccontextmanager
async def served(guarded: Guarded | None = None) -> AsyncIterator[tuple[Board, httpx.AsyncClient]]:
    board = Board()
    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            listener = listen_on("127.0.0.1:0")

            async def run(task_status: trio.TaskStatus[str]) -> None:
                await serve_board(listener, board, guarded=guarded, task_status=task_status)

            url = await nursery.start(run)
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
                yield board, client
            nursery.cancel_scope.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / PAUSE_S)):
        if is_so():
            return
        await trio.sleep(PAUSE_S)
    raise AssertionError(f"not within {WAIT_S} s")


def within(body: Callable[[Board, httpx.AsyncClient], Any], guarded: Guarded | None = None) -> None:
    async def run() -> None:
        async with served(guarded) as (board, client):
            await body(board, client)

    trio.run(run)


# --- the page's files --------------------------------------------------------------------------


def test_the_page_is_small_and_asks_no_other_host() -> None:
    files = page_files()
    assert {"index.html", "style.css", "app.js"} <= set(files)
    assert sum(map(len, files.values())) < PAGE_BYTES_MAX
    for name, content in files.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), (
            name
        )
    page = files["index.html"].decode()
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", page)


def test_every_file_comes_with_its_type_and_the_policy() -> None:
    async def body(board: Board, client: httpx.AsyncClient) -> None:
        for name in page_files():
            answer = await client.get("/" if name == "index.html" else f"/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-type"].split("/")[0] in ("text", "image")
        for path in ("/../state.py", "/static/app.js", "/%2e%2e/state.py", "/docs"):
            assert (await client.get(path)).status_code == 404

    within(body)
    assert "unsafe" not in POLICY


# --- states and streams ------------------------------------------------------------------------


def test_a_state_is_there_once_there_was_one() -> None:
    async def body(board: Board, client: httpx.AsyncClient) -> None:
        assert (await client.get("/api/state")).status_code == 503
        board.put(b'{"number":1}')
        assert (await client.get("/api/state")).json() == {"number": 1}

    within(body)


def test_all_who_watch_get_each_frame_once() -> None:
    async def body(board: Board, client: httpx.AsyncClient) -> None:
        board.put(b"1")
        got: dict[int, list[str]] = {0: [], 1: []}

        async def read(who: int) -> None:
            async with client.stream("GET", "/api/stream") as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        got[who].append(line.removeprefix("data: "))

        async with trio.open_nursery() as nursery:
            for who in got:
                nursery.start_soon(read, who)
            for count in (1, 2):
                await until(lambda count=count: min(map(len, got.values())) == count)
                board.put(b"%d" % (count + 1))
            await until(lambda: min(map(len, got.values())) == 3)
            board.close()
        assert got == {0: ["1", "2", "3"], 1: ["1", "2", "3"]}
        await until(lambda: len(board.watchers) == 0)

    within(body)


def test_who_does_not_read_holds_up_nobody_and_skips_frames() -> None:
    frame, frames = b'"' + b"x" * 1_000_000 + b'"', 60

    async def body(board: Board, client: httpx.AsyncClient) -> None:
        base = client.base_url
        slow = await trio.open_tcp_stream(base.host, base.port or 0)
        async with slow:
            await slow.send_all(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            board.put(b'"first"')  # a stream that has had none skips none
            seen = b""
            while b"first" not in seen:
                seen += await slow.receive_some(65_536)
            for _ in range(frames):
                board.put(frame)
                answer = await client.get("/api/state")  # others are served meanwhile
                assert len(answer.content) == len(frame)
            taken = 0
            while board.frames_skipped == 0:  # what the kernel holds comes first
                taken += len(await slow.receive_some(65_536))
                assert taken < frames * len(frame), "it got every frame"
        await until(lambda: len(board.watchers) == 0)

    within(body)


def test_more_streams_than_there_are_places_are_sent_away_and_counted() -> None:
    async def body(board: Board, client: httpx.AsyncClient) -> None:
        board.put(b"1")
        leave = trio.Event()

        async def hold(task_status: trio.TaskStatus[int]) -> None:
            async with client.stream("GET", "/api/stream") as answer:
                task_status.started(answer.status_code)
                await leave.wait()

        async with trio.open_nursery() as nursery:
            for _ in range(STREAMS_MAX):
                assert await nursery.start(hold) == 200
            assert len(board.watchers) == STREAMS_MAX
            assert (await client.get("/api/stream")).status_code == 503
            assert board.streams_refused == 1
            assert (await client.get("/api/state")).status_code == 200
            leave.set()

    within(body)


async def from_address(ip: str, client: httpx.AsyncClient) -> trio.SocketStream:
    base = client.base_url
    return await trio.open_tcp_stream(base.host, base.port or 0, local_address=ip)


@linux_only
@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_silent_connections_of_one_address_keep_no_other_out(words: bytes) -> None:
    async def body(board: Board, client: httpx.AsyncClient) -> None:
        board.put(b"1")
        greedy = [await from_address("127.0.0.2", client) for _ in range(CONNECTIONS_MAX + 50)]
        for each in greedy[-CONNECTIONS_MAX:]:
            await each.send_all(words)
        assert (await client.get("/api/state")).status_code == 200
        for _ in range(STREAMS_MAX):
            watching = await from_address("127.0.0.2", client)
            greedy.append(watching)
            await watching.send_all(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(board.watchers) == STREAMS_MAX)
        async with client.stream("GET", "/api/stream") as answer:
            assert answer.status_code == 200
            assert len(board.watchers) == STREAMS_MAX
        assert board.streams_refused == 1
        for each in greedy:
            await trio.aclose_forcefully(each)

    within(body)


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_head_has_to_come_in_time(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "HEAD_TIMEOUT_S", 0.3)

    async def body(board: Board, client: httpx.AsyncClient) -> None:
        board.put(b"1")
        slow = await from_address("127.0.0.1", client)
        with suppress(trio.BrokenResourceError):
            await slow.send_all(b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n")
            seen = b""
            while not seen.endswith(b"\r\n\r\n1"):
                seen += await slow.receive_some(4_096)
            await slow.send_all(words)
            assert await slow.receive_some() == b""
        await slow.aclose()

    within(body)


def test_a_server_with_open_streams_leaves_when_it_is_told_to() -> None:
    async def run() -> None:
        async with served() as (board, client):
            board.put(b"1")
            async with client.stream("GET", "/api/stream") as answer:
                assert answer.status_code == 200
                board.close()
                await answer.aread()  # the stream has an end

    trio.run(run)


def test_a_page_of_another_host_gets_nothing_under_its_own_name() -> None:
    async def body(board: Board, client: httpx.AsyncClient) -> None:
        board.put(b"1")
        for path in ("/api/state", "/api/stream", "/", "/app.js", "/nothing"):
            assert (await client.get(path, headers={"host": "evil.example"})).status_code == 421
        assert (await client.get("/api/state", headers={"host": "localhost:1"})).status_code == 200

    within(body)


def test_a_page_of_another_host_asks_for_nothing_here() -> None:
    done: list[object] = []
    guarded = Guarded(TOKEN, {"act": lambda wanted: str(done.append(wanted))})

    async def body(board: Board, client: httpx.AsyncClient) -> None:
        board.put(b"1")
        own = str(client.base_url).rstrip("/")
        given = {"authorization": f"Bearer {TOKEN}"}
        for origin, status in (("http://evil.example", 403), ("null", 403), (own, 200)):
            headers = {**given, "origin": origin}
            answer = await client.post("/api/actions/act", headers=headers, json={})
            assert answer.status_code == status
            assert (await client.get("/api/state", headers=headers)).status_code == status
        assert len(done) == 1

    within(body, guarded)


@pytest.mark.parametrize("name", ["swarm.lan", "SWARM.lan:80"])
def test_who_listens_for_others_answers_to_addresses_and_to_names_that_were_given(
    name: str,
) -> None:
    async def main() -> None:
        board = Board()
        board.put(b"1")
        async with trio.open_nursery() as nursery:
            listener = listen_on("0.0.0.0:0")
            port = listener.getsockname()[1]
            await nursery.start(partial(serve_board, listener, board, names=["swarm.lan"]))
            async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as client:
                for host, status in (
                    (name, 200), ("192.0.2.7:9", 200), ("[2001:db8::1]", 200),
                    (socket.gethostname(), 200), ("localhost", 200), ("evil.example", 421),
                ):  # fmt: skip
                    url = f"http://127.0.0.1:{port}/api/state"
                    answer = await client.get(url, headers={"host": host})
                    assert answer.status_code == status, host
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_addresses_that_are_none_are_refused_in_one_line() -> None:
    for address in ("host:", "x", "127.0.0.1:x", "127.0.0.1:70000", "192.0.2.1:0"):
        with pytest.raises(ConfigError, match=re.escape(address)):
            listen_on(address)
    with listen_on("127.0.0.1:0") as taken, pytest.raises(ConfigError, match="in use"):
        listen_on(f"127.0.0.1:{taken.getsockname()[1]}")


# --- what is watched ---------------------------------------------------------------------------


def test_a_signed_report_is_on_the_page_and_a_forged_one_is_counted() -> None:
    async def run() -> None:
        watch, one, other = Watch(), Identity.generate(), Identity.generate()
        topic, payload = signed(one, metrics={"round": 7.0})
        watch.take(topic, payload, NOW_S)
        watch.take(signed(other)[0], payload, NOW_S)
        with trio.fail_after(WAIT_S):
            async with trio.open_nursery() as nursery:

                async def show(task_status: trio.TaskStatus[str]) -> None:
                    await serve(
                        watch, "127.0.0.1:0", lambda: ReportSource("here"), unix_s=lambda: NOW_S,
                        counters=lambda: {"queue_dropped": 3}, task_status=task_status,
                    )  # fmt: skip

                url = await nursery.start(show)
                async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as client:
                    for _ in range(int(WAIT_S / PAUSE_S)):
                        answer = await client.get(f"{url}api/state")
                        if answer.status_code == 200:
                            break
                        await trio.sleep(PAUSE_S)
                nursery.cancel_scope.cancel()
        page = answer.json()
        assert page["headline"]["nodes"] == 1
        assert page["headline"]["round"] == 7
        assert page["telemetry"]["reports_taken"] == 1
        assert page["telemetry"]["dropped_forged"] == 1
        assert page["telemetry"]["queue_dropped"] == 3

    trio.run(run)


# --- actions -----------------------------------------------------------------------------------


def test_without_a_token_nothing_can_be_done() -> None:
    async def body(board: Board, client: httpx.AsyncClient) -> None:
        answer = await client.post("/api/actions/drain", json={})
        assert answer.status_code == 404

    within(body)
    with pytest.raises(ConfigError, match="too short"):
        Guarded("short", {})


def test_only_the_token_acts_and_bad_input_changes_nothing() -> None:
    done: list[Mapping[str, Any]] = []

    def drain(wanted: Mapping[str, Any]) -> str:
        if "worker" not in wanted:
            raise ConfigError("say which worker")
        done.append(wanted)
        return f"{wanted['worker']} gets no more work"

    async def body(board: Board, client: httpx.AsyncClient) -> None:
        async def post(name: str, content: bytes, token: str = TOKEN) -> httpx.Response:
            headers = {"authorization": f"Bearer {token}"}
            return await client.post(f"/api/actions/{name}", content=content, headers=headers)

        wanted = json.dumps({"worker": "w"}).encode()
        assert (await post("drain", wanted, "wrong")).status_code == 401
        assert (await client.post("/api/actions/drain", content=wanted)).status_code == 401
        assert (await client.get("/api/actions/drain")).status_code == 405
        assert (await post("erase", wanted)).status_code == 404
        assert (await post("drain", b"x" * (ACTION_BYTES_MAX + 1))).status_code == 413
        for bad in (b"", b"[]", b"{", b"\xff"):
            assert (await post("drain", bad)).status_code == 400
        assert (await post("drain", b"{}")).json() == {"error": "say which worker"}
        assert done == []
        assert (await post("drain", wanted)).json() == {"done": "w gets no more work"}
        assert done == [{"worker": "w"}]

    within(body, Guarded(TOKEN, {"drain": drain}))


def test_whoever_makes_frames_never_waits_for_who_reads_them() -> None:
    """Thousands of frames from one thread while streams are read in another: none blocks."""

    async def body(board: Board, client: httpx.AsyncClient) -> None:
        async def read() -> None:
            async with client.stream("GET", "/api/stream") as answer:
                async for _ in answer.aiter_bytes():
                    pass

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read)
            await until(lambda: len(board.watchers) == 4)
            for number in range(5_000):
                board.put(b"%d" % number)
                if number % 50 == 0:
                    await trio.sleep(0.001)
            board.close()

    within(body)
