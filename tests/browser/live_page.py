"""The page beside a `Watch` that a test feeds: real server, real reports, a clock that the test
sets."""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from swarm.identity import Identity
from swarm.telemetry.dashboard.page_server import Board, Guarded, listen_on, serve, serve_board
from swarm.telemetry.dashboard.page_state import ReportSource
from swarm.telemetry.fleet_view import Watch
from tests.dashboard_samples import NOW_S, signed

INTERVAL_S = 0.2  # between two frames: tests need not wait for whole seconds
START_TIMEOUT_S = 30.0
ARTIFACTS = Path(os.environ.get("ARTIFACTS", Path(__file__).parents[2] / "out" / "browser"))


class LivePage:
    """A page that is served in a thread. All its methods are for the test's thread."""

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self._listen = listen
        self.watch = Watch()
        self.now_s = NOW_S
        self.source = ReportSource("mqtt://127.0.0.1:1883", flag="mqtt://127.0.0.1:1883")
        self.guarded: Guarded | None = None
        self.url = ""
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._sequences: dict[str, int] = {}

    @contextmanager
    def running(self) -> Iterator["LivePage"]:
        """Serve until the end of the block. What is watched stays for another one."""
        up = threading.Event()
        self._scope = trio.CancelScope()

        async def main() -> None:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.url = await nursery.start(self._serve)
                    self._listen = self.url.removeprefix("http://").rstrip("/")
                    self._token = trio.lowlevel.current_trio_token()
                    up.set()

        thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
        thread.start()
        try:
            assert up.wait(START_TIMEOUT_S), "the page did not start"
            yield self
        finally:
            self._soon(self._scope.cancel)
            thread.join(START_TIMEOUT_S)
            assert not thread.is_alive(), "the page did not end"

    async def _serve(self, task_status: trio.TaskStatus[str]) -> None:
        await serve(
            self.watch, self._listen, lambda: self.source, unix_s=lambda: self.now_s,
            guarded=self.guarded, interval_s=INTERVAL_S, task_status=task_status,
        )  # fmt: skip

    def _soon(self, function: Callable[..., Any], *args: Any) -> None:
        if self._token is not None:
            self._token.run_sync_soon(functools.partial(function, *args))

    def report(self, identity: Identity, **changes: Any) -> None:
        """A signed report reaches the watch."""
        sequence = self._sequences[identity.peer_id] = self._sequences.get(identity.peer_id, 0) + 1
        fields = {"sequence": sequence, "sent_at_s": self.now_s} | changes
        self._soon(self.watch.take, *signed(identity, **fields), self.now_s)

    def take(self, topic: str, payload: bytes) -> None:
        """Anything reaches the watch."""
        self._soon(self.watch.take, topic, payload, self.now_s)

    def broker(self, *, connected: bool, away_s: float | None = None) -> None:
        """The broker answers, or not."""
        self.source = replace(self.source, connected=connected, away_s=away_s)


@contextmanager
def blank_page() -> Iterator[str]:
    """The address of a page that no frame has come to."""
    url: list[str] = []
    up, scope = threading.Event(), trio.CancelScope()
    token: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                url.append(await nursery.start(serve_board, listen_on("127.0.0.1:0"), Board()))
                token.append(trio.lowlevel.current_trio_token())
                up.set()

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    assert up.wait(START_TIMEOUT_S)
    try:
        yield url[0]
    finally:
        token[0].run_sync_soon(scope.cancel)
        thread.join(START_TIMEOUT_S)


def figures(round_number: int, place: int = 0) -> Mapping[str, float]:
    """Of a node that works, different for each round and node."""
    return {
        "uptime_s": 8.0 * round_number,
        "round": float(round_number),
        "policy_version": float(round_number),
        "round_s": 8.0,
        "own_reward": 0.3 + 0.004 * round_number + 0.02 * place,
        "held_out_ratio": 0.25 + 0.004 * round_number + 0.02 * place,
        "external_groups": 2.0,
        "external_groups_wanted": 2.0,
        "foreign_gradient_ratio": 0.3 + 0.1 * place,
        "sharing_per_token_ratio": 1.6,
        "bytes_in_total": 1e5 * round_number * (1 + 0.1 * place),
        "bytes_out_total": 9e4 * round_number * (1 + 0.1 * place),
        "accepted_total": 6.0 * round_number,
        "generated_tokens_total": 900.0 * round_number,
        "tokens_per_s": 850.0,
        "peers": 3.0,
        "pool_groups": 40.0,
        "pool_bytes": 1e6,
        "memory_bytes": 6e8,
    }
