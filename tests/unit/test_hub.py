"""A model directory goes to a hub, by the hub's own client, to a server that speaks its API."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from node.commands import environments
from swarm.errors import ChildFailed, ConfigError

TOKEN = "hf_aToken"


class Hub(BaseHTTPRequestHandler):
    """What an upload of small files asks of a hub."""

    token = TOKEN

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        store: dict[str, object] = self.server.store  # type: ignore[attr-defined]
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            self._answer({"error": "who are you?"}, 401)
        elif self.path == "/api/repos/create":
            store["made"] = json.loads(body)
            self._answer({"url": f"http://{self.headers['Host']}/me/policy"})
        elif self.path == "/api/models/me/policy/preupload/main":
            files = [each["path"] for each in json.loads(body)["files"]]
            told = [
                {"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in files
            ]
            self._answer({"files": told})
        elif self.path == "/api/models/me/policy/commit/main":
            lines = [json.loads(line) for line in body.splitlines()]
            store["message"] = lines[0]["value"]["summary"]
            for each in lines[1:]:
                content = base64.b64decode(each["value"]["content"])
                store[each["value"]["path"]] = content
            said = {
                "commitUrl": f"http://{self.headers['Host']}/me/policy/commit/1",
                "commitOid": "1",
            }
            self._answer({"success": True, **said, "hookOutput": ""})
        else:
            self._answer({"error": f"no {self.path}"}, 404)

    def _answer(self, value: object, status: int = 200) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.store = {}  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    api = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api(endpoint=endpoint, token=TOKEN))
    yield server.store  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"\x00weights")
    return directory


def test_all_files_of_a_model_arrive(store: dict[str, object], model: Path) -> None:
    said: list[str] = []
    environments.push(model, "me/policy", "after round 3", said.append)
    assert store["model.safetensors"] == b"\x00weights"
    assert store["config.json"] == b"{}"
    assert store["message"] == "after round 3"
    assert isinstance(store["made"], dict)
    assert store["made"]["visibility"] == "private"
    [line] = said
    assert line.startswith("me/policy: uploaded, http://")
    assert line.endswith("/me/policy/commit/1")


def test_a_hub_that_refuses_is_told_in_one_line_and_the_model_stays(
    store: dict[str, object], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "token", "another")
    with pytest.raises(ChildFailed, match=r"me/policy: not uploaded \(.*401.*\); the model is in"):
        environments.push(model, "me/policy", "after round 3", print)
    assert not store
    assert (model / "model.safetensors").exists()


def test_no_hub_at_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = huggingface_hub.HfApi
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: api(endpoint="http://127.0.0.1:1", token=TOKEN)
    )
    with pytest.raises(ChildFailed, match="not uploaded"):
        environments.push(model, "me/policy", "x", print)


@pytest.mark.parametrize("name", ["policy", "a/b/c", "a b/c", "https://hub/a/b", ""])
def test_what_is_no_repository(name: str) -> None:
    with pytest.raises(ConfigError, match="write OWNER/NAME"):
        environments.check_repository(name)
