"""A small server of OpenAI's HTTP interface, which answers sums and misbehaves as it is told."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from threading import Thread
from typing import Any

Answer = Callable[["Handler"], None]
SUM = re.compile(r"(\d+) ?\+ ?(\d+)")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "OpenAiTestServer"
    asked: dict[str, Any]

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self.asked = {}
        self.server.seen.append((self.path, dict(self.headers), {}))
        if self.server.key and self.headers["authorization"] != f"Bearer {self.server.key}":
            self.reply({"error": {"message": "no such key"}}, 401)
            return
        self.reply({"object": "list", "data": self.server.models})

    def do_POST(self) -> None:
        self.asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, dict(self.headers), self.asked))
        misbehave = self.server.faults.pop(0) if self.server.faults else self.server.answer
        misbehave(self)

    # --- answers -----------------------------------------------------------------------------

    def reply(self, told: object, status: int = 200, **headers: str) -> None:
        self.raw(json.dumps(told).encode(), status, **headers)

    def raw(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def say(self, text: object, reason: object = "stop", **more: object) -> None:
        """One completion, of a chat or of plain text."""
        is_chat = self.path.endswith("/chat/completions")
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": reason, **more}
        self.reply({"choices": [choice], "usage": {"completion_tokens": 3}})

    def question(self) -> str:
        found = self.asked.get("messages")
        return str(found[-1]["content"] if found else self.asked["prompt"])


def answer_sums(handler: Handler) -> None:
    """Right in half of the cases, by the seed."""
    found = SUM.search(handler.question())
    right = sum(map(int, found.groups())) if found else 0
    handler.say(str(right + Random(handler.asked["seed"]).randrange(2)))


class OpenAiTestServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: list[Any] = [{"id": "sums", "owned_by": "tests"}]
        self.key = ""
        self.answer: Answer = answer_sums
        self.faults: list[Answer] = []  # of the next completions, one each
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: object) -> None:
        """A client that went away is no fault."""


@contextmanager
def openai_server() -> Iterator[OpenAiTestServer]:
    with OpenAiTestServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def no_such_server() -> str:
    """The URL of a port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}/v1"
