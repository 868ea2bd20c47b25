"""The page over HTTP: Starlette on uvicorn, in a thread with a loop of its own.

The caller's loop makes one frame each interval and leaves it at the `Board`; all watchers get the
same bytes. A slow reader skips frames, so nothing waits for it. uvicorn, because it brings two
packages and Hypercorn, which could share the caller's loop, seven.
"""

import functools
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

import anyio
import trio
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.errors import ConfigError
from swarm.limits.address_blocks import path_of
from swarm.limits.bounded_table import BoundedTable
from swarm.telemetry.dashboard.listening import kept, read_kept, restore, write_kept
from swarm.telemetry.dashboard.page_state import PageState, ReportSource
from swarm.telemetry.dashboard.saved import TYPES, page_files
from swarm.telemetry.fleet_view import NodeView, Watch
from swarm.telemetry.web_hosts import WebHosts

KEEP_EVERY_S: Final = 20.0
STREAMS_MAX: Final = 32  # watchers at once; a page that is refused a stream polls
CONNECTIONS_MAX: Final = 128  # beyond these one of the address with most ends, silent ones first
HEAD_TIMEOUT_S: Final = 10.0  # for the head of a request, from connecting or from the last answer
ACTION_BYTES_MAX: Final = 4_096
INTERVAL_S: Final = 0.5  # between two frames
PAUSE_S: Final = 0.1  # between two looks of a stream for a new frame
LEISURE: Final = 7  # the least pause after a frame, as a multiple of the time that it took to make
RETRY_MS: Final = 2_000  # before a browser asks again for a stream that broke
LEAVE_TIMEOUT_S: Final = 2
PORT_DEFAULT: Final = 8080
TOKEN_CHARS_MIN: Final = 16

# Nothing but this server's own files runs or is shown, and nobody may frame the page.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
Action = Callable[[Mapping[str, Any]], str]
"""Returns one sentence on what it did, or raises ConfigError. Called in a thread of its own."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """Actions by name, for whoever has the token."""

    token: str
    actions: Mapping[str, Action]

    def __post_init__(self) -> None:
        if len(self.token) < TOKEN_CHARS_MIN:
            raise ConfigError(f"the token is too short: at least {TOKEN_CHARS_MIN} characters")


class Board:
    """The newest frame, put there by one thread and read in the server's. Neither waits for the
    other: streams look for themselves, every `PAUSE_S`."""

    def __init__(self) -> None:
        # The newest frame's number and bytes, empty before there is one; replaced as one, so that
        # no lock is needed.
        self.newest = (0, b"")
        self._closed = False
        self.watchers: BoundedTable[object, None] = BoundedTable(STREAMS_MAX, newest_first=True)
        self.streams_refused = 0
        self.frames_skipped = 0  # by who reads slowly

    def put(self, frame: bytes) -> None:
        """Replace the frame. From one thread; returns at once."""
        self.newest = (self.newest[0] + 1, frame)

    def counters(self) -> dict[str, int]:
        return {
            "pages_open": len(self.watchers),
            "pages_refused": self.streams_refused,
            "frames_skipped": self.frames_skipped,
        }

    def close(self) -> None:
        """End all streams, so that the server can. From any thread."""
        self._closed = True

    async def frames(self, watcher: object) -> AsyncIterator[bytes]:
        """The frame now, and each that is the newest when the one before was taken, while the
        watcher has its place."""
        sent = 0
        while not self._closed and watcher in self.watchers:
            number, frame = self.newest
            if number > sent:
                self.frames_skipped += number - sent - 1 if sent else 0
                sent = number
                yield frame
            else:
                await anyio.sleep(PAUSE_S)


def application(board: Board, *, hosts: WebHosts, guarded: Guarded | None = None) -> ASGIApp:
    """The web application. `hosts`: by which names it may be called."""

    async def state(_: Request) -> Response:
        frame = board.newest[1]
        if not frame:
            return JSONResponse({"error": "nothing was heard yet"}, 503, {"retry-after": "1"})
        return Response(frame, media_type="application/json")

    routes = [Route("/api/state", state), Route("/api/stream", functools.partial(_stream, board))]
    if guarded is not None:
        act = functools.partial(_act, guarded)
        routes.append(Route("/api/actions/{name}", act, methods=["POST"]))
    for name, content in page_files().items():
        path = "/" if name == "index.html" else f"/{name}"
        routes.append(Route(path, functools.partial(_file, name, content)))
    return Starlette(routes=routes, middleware=[Middleware(_Guard, hosts=hosts)])


async def _file(name: str, content: bytes, _: Request) -> Response:
    return Response(content, headers={"content-type": TYPES[PurePath(name).suffix]})


async def _stream(board: Board, request: Request) -> Response:
    watcher = object()
    gone = board.watchers.put(watcher, None, path_of(request.client and request.client.host))
    board.streams_refused += gone is not None
    if gone is not None and gone.key is watcher:
        return JSONResponse({"error": "too many watch"}, 503, {"retry-after": "10"})

    async def events() -> AsyncIterator[bytes]:
        yield b"retry: %d\n\n" % RETRY_MS
        async for frame in board.frames(watcher):
            yield b"data: " + frame + b"\n\n"

    return _CountedStream(board, watcher, events())


class _CountedStream(StreamingResponse):
    """Events that have one of the board's places until they end."""

    def __init__(self, board: Board, watcher: object, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._board, self._watcher = board, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._board.watchers.pop(self._watcher)


async def _act(guarded: Guarded, request: Request) -> Response:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), guarded.token.encode()):
        return JSONResponse({"error": "that is not the token"}, 401)
    action = guarded.actions.get(request.path_params["name"])
    if action is None:
        return JSONResponse({"error": "there is no such action"}, 404)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > ACTION_BYTES_MAX:
            return JSONResponse({"error": "too much was sent"}, 413)
    try:
        wanted = json.loads(body)
        if not isinstance(wanted, dict):
            return JSONResponse({"error": "what was sent is no JSON object"}, 400)
        done = await anyio.to_thread.run_sync(action, wanted)
    except (ConfigError, ValueError) as error:
        return JSONResponse({"error": str(error)}, 400)
    return JSONResponse({"done": done})


@dataclass(frozen=True, slots=True)
class _Guard:
    """Answers only to names of ours, and with the same protecting headers everywhere."""

    app: ASGIApp
    hosts: WebHosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        given = Request(scope).headers
        refusal = self.hosts.objection(given.getlist("host"), given.getlist("origin"))
        answer = PlainTextResponse(refusal[1], refusal[0]) if refusal else self.app
        await answer(scope, receive, with_headers)


# --- who is connected --------------------------------------------------------------------------


class _Client(H11Protocol):
    """One connection, which has a place among `CONNECTIONS_MAX` and so long for each head."""

    _due: Any = None

    def __init__(self, clients: "Clients", **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._clients = clients

    @property
    def is_answered(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._due is not None:
            self._due.cancel()
        self._clients.pop(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def _await_head(self) -> None:
        if self.transport.is_closing():
            return
        gone = self._clients.put(self, None, path_of(self.client and self.client[0]))
        if gone is not None:
            gone.key.transport.abort()
        if self._due is not None:
            self._due.cancel()
        self._due = self.loop.call_later(HEAD_TIMEOUT_S, self._too_late)

    def _too_late(self) -> None:
        if not self.is_answered:
            self.transport.abort()


Clients = BoundedTable[_Client, None]


# --- running it --------------------------------------------------------------------------------


def frame_of(state: Mapping[str, Any]) -> bytes:
    """A state as it is sent: one line of JSON."""
    return json.dumps(state, allow_nan=False, separators=(",", ":")).encode()


@dataclass(eq=False)
class Frames:
    """Makes frames from strangers' reports. If a frame fails, the last good one is shown again with
    `failing` set, and counted."""

    state: PageState
    failed: int = 0
    _good: Mapping[str, Any] | None = None

    def make(
        self, nodes: Sequence[NodeView], told: Mapping[str, int], source: ReportSource, now_s: float
    ) -> bytes | None:
        """The next frame; None before the first good one."""
        try:
            counts = {**told, "frames_failed": self.failed}
            state = self.state.look(nodes, counts, source, now_s)
            frame = frame_of(state)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            self.failed += 1
            if self._good is None:
                return None
            told = {**told, "frames_failed": self.failed}
            return frame_of({**self._good, "telemetry": told, "failing": True})
        self._good = state
        return frame


def listen_on(address: str) -> socket.socket:
    """A socket at `host:port`, `[v6]:port` or `port`; without a host for this machine alone. Port 0
    is any.

    Raises:
        ConfigError: it is no address, or it is taken.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"{address}: is no address to listen on; say 127.0.0.1:{PORT_DEFAULT}")
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None


async def serve(
    watch: Watch,
    listen: str,
    source: Callable[[], ReportSource],
    *,
    unix_s: Callable[[], float],
    counters: Callable[[], Mapping[str, int]] = dict,
    guarded: Guarded | None = None,
    names: Sequence[str] = (),
    keep: Path | None = None,
    interval_s: float = INTERVAL_S,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Show what is watched until cancelled; reports the page's address once it answers.

    `watch` is read on the caller's loop; `counters` are further ones to show, by name; `names`:
    further ones of the page, as of `WebHosts`; `keep`: the file in which the page's curves and
    reports survive a restart.

    Raises:
        ConfigError: it cannot listen there, as itself or in a group.
    """
    listener, board = listen_on(listen), Board()
    state = PageState(can_act=guarded is not None)
    frames = Frames(state)
    async with trio.open_nursery() as nursery:
        if keep is not None:
            content = await trio.to_thread.run_sync(read_kept, keep)
            if content is not None:
                restore(content, watch, state, unix_s())
            nursery.start_soon(_keep, keep, watch, state, unix_s)
        served = functools.partial(serve_board, listener, board, guarded=guarded, names=names)
        url = await nursery.start(served)
        task_status.started(url)
        while True:
            now_s, began_s = unix_s(), trio.current_time()
            told = {**watch.counters(), **counters(), **board.counters()}
            frame = frames.make(watch.nodes(now_s), told, source(), now_s)
            if frame is not None:
                board.put(frame)
            took_s = trio.current_time() - began_s
            await trio.sleep(max(interval_s - took_s, LEISURE * took_s))


async def _keep(path: Path, watch: Watch, state: PageState, unix_s: Callable[[], float]) -> None:
    """Write what the page has seen every `KEEP_EVERY_S`, and once more at the end."""

    async def write() -> None:
        content = kept(watch, state, unix_s())
        await trio.to_thread.run_sync(write_kept, path, content)

    try:
        while True:
            await trio.sleep(KEEP_EVERY_S)
            await write()
    finally:
        with trio.CancelScope(shield=True):
            await write()


async def serve_board(
    listener: socket.socket,
    board: Board,
    *,
    guarded: Guarded | None = None,
    names: Sequence[str] = (),
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a board until cancelled, in a thread of its own; reports the page's address. Closes the
    listener."""
    host, port = listener.getsockname()[:2]
    hosts = WebHosts(host, [socket.gethostname(), *names])
    clients = Clients(CONNECTIONS_MAX, rank_of=lambda client, _: client.is_answered)
    config = uvicorn.Config(
        application(board, guarded=guarded, hosts=hosts),
        loop="asyncio",
        http=functools.partial(_Client, clients),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LEAVE_TIMEOUT_S,
    )
    server = uvicorn.Server(config)

    async def leave() -> None:
        try:
            await trio.sleep_forever()
        finally:
            board.close()
            server.should_exit = True

    with listener:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        task_status.started(url)  # clients that connect before the server runs wait in its backlog
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(server.run, [listener])
            nursery.cancel_scope.cancel()
