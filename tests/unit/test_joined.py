"""What a data directory says of how its node was started."""

import json
import os
import socket
from pathlib import Path

import pytest

from node.config.joined import FILE_NAME, Joined, as_joined, recall, remember
from node.config.load import load_config
from swarm.errors import ConfigError
from swarm.transport.libp2p.addresses import on_free_ports


def test_what_was_kept_stands_behind_flags_and_environment(tmp_path: Path) -> None:
    config = load_config({"data_dir": tmp_path, "model": "smollm2", "lora_rank": 4}, {})
    remember(config, "sums", config.model, [4001])
    assert recall(tmp_path) == Joined("sums", "smollm2", 4, (4001,))
    given = {"data_dir": tmp_path, "model": None}
    flags = {"data_dir": tmp_path, "model": "smollm2", "lora_rank": 4}
    assert as_joined(given, {}, None) == (flags, Path("sums"))
    assert as_joined({**given, "model": "tiny"}, {}, Path("demo")) == (
        {**flags, "model": "tiny"},
        Path("demo"),
    )
    environ = {"SWARM_NODE_MODEL": "tiny", "SWARM_NODE_RUN": "demo"}
    assert as_joined(given, environ, None) == ({"data_dir": tmp_path, "lora_rank": 4}, None)


def test_a_file_is_kept_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").touch()
    remember(load_config({"data_dir": tmp_path}, {}), "mine.toml", "tiny", [])
    assert recall(tmp_path).run == os.path.join(tmp_path, "mine.toml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 20_000,
        json.dumps({"run": "sums", "model": "tiny", "lora_rank": 0}),
        json.dumps({"run": "sums", "model": "tiny", "lora_rank": 0, "ports": [70_000]}),
        json.dumps({"run": "sums", "model": "tiny", "lora_rank": "x", "ports": []}),
        json.dumps({"run": "s" * 70_000, "model": "tiny", "lora_rank": 0, "ports": []}),
    ],
)
def test_what_is_not_ours_is_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert recall(tmp_path) == Joined()


def test_a_port_is_taken_again_where_it_is_free() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            free = other.getsockname()[1]
        wanted = ["/ip4/127.0.0.1/tcp/0"] * 2
        assert on_free_ports(wanted, [taken, free]) == [wanted[0], f"/ip4/127.0.0.1/tcp/{free}"]
    assert on_free_ports(["/ip4/127.0.0.1/tcp/9"], [free]) == ["/ip4/127.0.0.1/tcp/9"]
    assert on_free_ports(wanted, []) == wanted
    with pytest.raises(ConfigError):
        on_free_ports(["nonsense"], [free])
