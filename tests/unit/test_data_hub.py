"""Data sets of a hub: fetched by id, from the cache if it is gone, one line without either."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.envs.data import hub
from node.envs.data.dataset import DataRules, located, read_file
from swarm.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow")
huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789" * 4
PARTS = ("main/train", "main/test", "socratic/train")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a hub as a data set takes."""

    content: bytes

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/owner/sums/tree/"):
            files = [
                {"type": "file", "path": f"{part}/0000.parquet", "size": len(self.content),
                 "oid": hashlib.sha1(self.content).hexdigest()}
                for part in PARTS
            ]  # fmt: skip
            self._send(200, json.dumps(files).encode())
        elif self.path.startswith("/api/datasets/owner/sums/"):
            files = [{"rfilename": f"{part}/0000.parquet"} for part in PARTS]
            told = {"_id": "0", "id": "owner/sums", "sha": COMMIT, "siblings": files}
            self._send(200, json.dumps(told).encode())
        elif "/resolve/" in self.path:
            self._send(200, self.content)
        else:
            self._send(404, b"{}")

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"question": ["2+2="], "answer": ["#### 4"]}), file)
    Hub.content = file.read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(hub, "CACHE", tmp_path / "hub")
    monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_part_is_fetched_by_id_and_kept(served: http.server.HTTPServer, tmp_path: Path) -> None:
    file = located("owner/sums/socratic", tmp_path)
    assert read_file(file, DataRules()).content.data == b'{"answer":"4","question":"2+2="}\n'
    with pytest.raises(ConfigError, match="it holds main/test, main/train, socratic/train; name"):
        located("owner/sums", tmp_path)
    with pytest.raises(ConfigError, match="no such file, and no data set of the hub") as refused:
        located("owner/none", tmp_path)
    assert "\n" not in str(refused.value)
    served.shutdown()
    served.server_close()
    assert located("owner/sums/socratic/train", tmp_path) == file


def test_a_file_comes_before_a_hub_and_silence_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "sums").touch()
    assert located("owner/sums", tmp_path) == tmp_path / "owner" / "sums"
    gone = tmp_path / "gone.jsonl"
    assert located("gone.jsonl", tmp_path) == gone
    monkeypatch.setattr(hub, "CACHE", tmp_path / "hub")
    monkeypatch.setattr(hub, "ANSWER_S", 0.01)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: _never())
    with pytest.raises(ConfigError, match="no answer within 0 s") as refused:
        located("owner/other", tmp_path)
    assert "\n" not in str(refused.value)


def _never() -> None:
    threading.Event().wait(20)
