"""`swarm-node weights publish` and `weights fetch`, as real processes over loopback libp2p."""

import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from node.cli import main
from node.hosting.policy_weights import POLICIES, STORE
from node.observe.text_format import amount
from swarm.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from swarm.identity import Identity
from swarm.weights.manifest import decode_manifest
from tests.integration.nodes import ENVIRON, LOOPBACK, WAIT_S, swarm_node, until
from tests.integration.stalling import stalling_way
from tests.weights_files import tree, write_model

pytestmark = pytest.mark.integration

WEIGHTS = 2_000_000
TENSOR_BYTES = 2 * WEIGHTS
SUMMARY = re.compile(
    r"version (\d+) from ([\d,a-z]+): (\S+ \S*B) fetched in \S+ s"
    r"(?: \(\S+ times the least possible\))?"
    r"(?:, (\S+ \S*B) less than as a whole)?(?:, (\S+ \S*B) more were here)?; "
    r"patched in \S+ s, in (.+)"
)
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6}


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


@dataclass
class Command:
    """A `swarm-node weights` command on a data directory of its own, that may be started again."""

    directory: Path
    arguments: tuple[object, ...]
    starts: list[subprocess.Popen[bytes]] = field(default_factory=list)
    file_bytes_max: int | None = None  # the largest file that the kernel lets it write

    def start(self) -> "Command":
        self.directory.mkdir(parents=True, exist_ok=True)

        def limit() -> None:
            if self.file_bytes_max is not None:
                most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_bytes_max, most))

        with self.log.open("ab") as log:
            self.starts.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "node.cli", "weights"),
                        *map(str, self.arguments),
                        *("--data-dir", str(self.directory), "--listen", LOOPBACK),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=ENVIRON,
                    preexec_fn=limit,
                )
            )
        return self

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    def said(self) -> str:
        return self.log.read_text()

    def chunks(self) -> set[str]:
        """Hashes of the chunks on its disk."""
        return {path.name for path in (self.directory / STORE).glob("chunks/*/*")}

    def knows(self, other: "Command") -> bool:
        """Whether it has saved the other's address, or is the other."""
        peer = Identity.load(other.directory / "identity.pem").peer_id
        book = self.directory / "addresses.json"
        return self is other or (book.exists() and peer in book.read_text())

    def version(self, number: int) -> dict[str, bytes]:
        """The files of a version."""
        return tree(self.directory / POLICIES / "policy" / "versions" / f"v{number:08d}")

    def until_says(self, text: str) -> str:
        """Wait for a line with this text, and give it back."""

        def found() -> str | None:
            assert text in self.said() or self.starts[-1].poll() is None, self.said()
            return next((line for line in self.said().splitlines() if text in line), None)

        return str(until(found, said=self.said))

    def summary(self, version: int) -> dict[str, str]:
        """Of the version's summary line."""
        match = SUMMARY.fullmatch(self.until_says(f"version {version} from "))
        assert match is not None, self.said()
        names = ("version", "bases", "bytes", "saved", "reused", "where")
        return dict(zip(names, match.groups(), strict=True))

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        for process in self.starts:
            if process.poll() is None:
                process.send_signal(how)
            process.wait()


class Transfers:
    """A publisher, and fetchers that know its address."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commands: list[Command] = []
        self.fetch_flags: list[str] = []

    def publish(self, source: Path, *flags: str) -> Command:
        command = Command(self.directory / "publisher", ("publish", source, *flags))
        command.log.unlink(missing_ok=True)  # of an earlier one, at another address
        command.start()
        self.commands.append(command)
        line = command.until_says("weights fetch --publisher").strip()
        self.fetch_flags = line.split("weights fetch ")[1].split()
        return command

    def fetch(self, name: str, *flags: object, file_bytes_max: int | None = None) -> Command:
        command = Command(
            self.directory / name,
            ("fetch", *self.fetch_flags, *flags),
            file_bytes_max=file_bytes_max,
        ).start()
        self.commands.append(command)
        return command


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Transfers]:
    found = Transfers(tmp_path)
    yield found
    for command in found.commands:
        command.kill()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two versions, of which the second is the first after a step."""
    directory = tmp_path_factory.mktemp("models")
    for version in (1, 2):
        write_model(
            directory / str(version), version, base=1 if version > 1 else None, size=WEIGHTS
        )
    return {version: directory / str(version) for version in (1, 2)}


def replace(source: Path, model: Path) -> None:
    """As a trainer that saves over its last checkpoint."""
    for path in model.iterdir():
        shutil.copyfile(path, source / path.name)


def test_two_fetchers_get_a_version_and_then_the_delta(
    transfers: Transfers, models: dict[int, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(models[1], tmp_path / "source")
    transfers.publish(source, "--follow")
    one = transfers.fetch("one", "--follow", "--out", tmp_path / "out")
    two = transfers.fetch("two", "--follow")
    full = [bytes_of(each.summary(1)["bytes"]) for each in (one, two)]
    assert one.version(1) == two.version(1) == tree(models[1])
    assert tree(tmp_path / "out") == tree(models[1])
    replace(source, models[2])
    for each, before in zip((one, two), full, strict=True):
        summary = each.summary(2)
        assert summary["bases"] == "1"
        assert bytes_of(summary["bytes"]) < before / 10
        assert bytes_of(summary["saved"]) > before / 2
    assert one.version(2) == two.version(2) == tree(models[2])
    until(lambda: tree(tmp_path / "out") == tree(models[2]))
    assert swarm_node("weights", "verify", tmp_path / "out").returncode == EXIT_OK


def test_what_was_fetched_before_kill_9_is_not_fetched_again(
    transfers: Transfers, models: dict[int, Path]
) -> None:
    publisher = transfers.publish(models[1])
    every = publisher.chunks()
    peer = next(flag for flag in transfers.fetch_flags if "/tcp/" in flag)
    port = peer.split("/tcp/")[1].split("/")[0]
    half_bytes = sum(path.stat().st_size for path in _chunk_files(publisher)) // 2
    with stalling_way(int(port), half_bytes) as way:
        through = peer.replace(f"/tcp/{port}", f"/tcp/{way.port}")
        transfers.fetch_flags[transfers.fetch_flags.index(peer)] = through
        fetcher = transfers.fetch("fetcher")
        until(way.stalled.is_set, said=fetcher.said)
        until(fetcher.chunks, said=fetcher.said)
        fetcher.kill()
        before = fetcher.chunks()
        assert before < every
        written = {path.name: path.stat().st_mtime_ns for path in _chunk_files(fetcher)}
        way.let_all_through()
        fetcher.start()
        summary = fetcher.summary(1)
    assert fetcher.version(1) == tree(models[1])
    again = {path.name: path.stat().st_mtime_ns for path in _chunk_files(fetcher)}
    assert {name: again[name] for name in before} == written
    kept = sum(path.stat().st_size for path in _chunk_files(fetcher) if path.name in before)
    assert summary["reused"] == amount(kept, "B")


def _chunk_files(command: Command) -> list[Path]:
    return list((command.directory / STORE).glob("chunks/*/*"))


def test_peers_that_together_hold_every_chunk_finish_without_the_publisher(
    transfers: Transfers, models: dict[int, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(models[1], tmp_path / "source")
    write_model(tmp_path / "other", 3, size=4 * WEIGHTS)  # no step of the first: fetched as a whole
    publisher = transfers.publish(source, "--follow")
    fetchers = [transfers.fetch(name, "--follow") for name in ("one", "two", "three")]
    for fetcher in fetchers:
        fetcher.summary(1)
    until(lambda: all(each.knows(other) for each in fetchers for other in fetchers))
    before = publisher.chunks()
    replace(source, tmp_path / "other")
    publisher.until_says("version 2 of ")
    manifest = publisher.directory / "weights/policies/policy/versions/v00000002.manifest"
    ways = decode_manifest(manifest.read_bytes()).artifacts
    needed = min(way.size_bytes for way in ways if way.base_version is not None)

    def held_bytes() -> int:
        sizes = {path.name: path.stat().st_size for each in fetchers for path in _chunk_files(each)}
        return sum(size for name, size in sizes.items() if name not in before)

    until(lambda: held_bytes() >= needed)
    publisher.kill()
    for fetcher in fetchers:
        fetcher.summary(2)
        assert fetcher.version(2) == tree(tmp_path / "other")


def test_a_fetcher_that_reaches_nobody_says_so_and_waits(
    transfers: Transfers, models: dict[int, Path]
) -> None:
    transfers.publish(models[1]).kill()
    fetcher = transfers.fetch("fetcher")
    fetcher.until_says("cannot join through ")
    assert fetcher.starts[-1].poll() is None


def test_a_disk_that_is_full_is_one_line_and_the_old_version_stays(
    transfers: Transfers, models: dict[int, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(models[1], tmp_path / "source")
    publisher = transfers.publish(source, "--once")
    fetcher = transfers.fetch("fetcher", "--follow")
    fetcher.summary(1)
    assert publisher.starts[-1].wait(WAIT_S) == EXIT_OK  # all that came have it
    assert "version 1 is at 1 peer after" in publisher.said()
    fetcher.kill(signal.SIGINT)
    assert fetcher.starts[-1].returncode == EXIT_OK
    replace(source, models[2])
    transfers.commands.pop(0)
    transfers.publish(source)
    full = Command(
        fetcher.directory,
        ("fetch", *transfers.fetch_flags),
        file_bytes_max=TENSOR_BYTES // 2,  # chunks fit, tensors do not
    ).start()
    transfers.commands.append(full)
    line = full.until_says("version 2 failed: ")
    assert line.endswith("File too large; version 1 still serves")
    assert full.starts[-1].wait() == EXIT_FAILED
    assert fetcher.version(1) == tree(models[1])
    assert fetcher.version(2) == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fetch", "--peer", "{peer}"], "name the publisher's key with --publisher PEERID"),
        (["fetch", "--publisher", "{id}"], "name a peer with --peer"),
        (["fetch", "--peer", "{peer}", "--publisher", "12D3"], "--publisher 12D3: "),
        (["fetch", "--peer", "{peer}", "--publisher", "{id}", "--policy", "A"], "--policy A: "),
        (["fetch", "--peer", "{peer}", "--publisher", "{id}", "--out", "node"], "/node: holds"),
        (["publish", "nowhere"], "nowhere: no such directory"),
        (["publish", "{empty}"], "has no .safetensors file"),
        (["publish", "{empty}", "--store-bytes", "0"], "--store-bytes 0: must be"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = "12D3KooWJ1t4yZnXeVL8oWCBozE5FWQtJnWf4nW3U2uyXCSEUyof"
    (tmp_path / "empty").mkdir()
    names = {
        "id": identity,
        "peer": f"/ip4/127.0.0.1/tcp/9/p2p/{identity}",
        "empty": str(tmp_path / "empty"),
    }
    rest = ["--data-dir", str(tmp_path / "data"), "--listen", LOOPBACK]
    status = main(["weights", *(each.format(**names) for each in arguments), *rest])
    error = capsys.readouterr().err
    assert status == EXIT_USAGE, error
    assert told in error
    assert error.count("\n") == 1
