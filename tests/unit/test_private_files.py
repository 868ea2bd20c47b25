"""Files of a data directory are for their owner alone, and shared ones are not."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from coordinator.overrides import drain
from node.observe.event_log import EventLog
from node.observe.records import Trouble
from swarm.exchange.pool import Pool, PoolLimits
from swarm.identity import PeerId
from swarm.peers.address_book import AddressBook
from swarm.storage import (
    UMASK_VARIABLE,
    data_directory,
    make_private,
    make_shared,
    private_files,
    shared_files,
    shared_umask,
    write_whole,
)


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(directory: Path) -> list[str]:
    """What of a directory, itself included, anybody but its owner may use in any way."""
    found = []
    for path in (directory, *directory.rglob("*")):
        with suppress(FileNotFoundError):  # a node at work renames and deletes
            if mode(path) & 0o077 and not path.is_symlink():
                found.append(str(path.relative_to(directory)))
    return found


def fill(directory: Path) -> None:
    """As a node and its children do."""
    with (
        Pool(directory / "pool.sqlite", PoolLimits(9, 9_999, 9)),
        EventLog(directory / "events.jsonl", lambda: 1.0) as events,
    ):
        events.write(Trouble("x"))
        book = AddressBook(directory / "addresses.json")
        book.learn(PeerId("ann"), ["/memory/1/p2p/ann"], worked=True)
        trio.run(book.save_if_changed, trio.to_thread.run_sync)
        write_whole(directory / "state.json", json.dumps({}))
        (directory / "checkpoints" / "round-1").mkdir(parents=True)
        (directory / "checkpoints" / "round-1" / "model").write_text("x")
        command = "import pathlib; d = pathlib.Path('child'); d.mkdir(); (d / 'x').touch()"
        subprocess.run([sys.executable, "-c", command], cwd=directory, check=True)
        names = {path.name for path in directory.iterdir()}
        assert {"pool.sqlite", "pool.sqlite-wal"} <= names, "while it is open"
        assert open_to_others(directory) == []


def test_all_that_a_node_makes_in_its_data_directory_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "made" / "node"
    said: list[str] = []
    with data_directory(path, say=said.append):
        fill(path)
    assert said == []
    assert open_to_others(path) == []
    assert mode(tmp_path / "made") == 0o755, "no part of it"


def test_one_that_others_could_read_is_closed_with_all_in_it(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    (path / "a" / "b").mkdir(parents=True)
    for name in ("lock", "events.jsonl", "a/b/c"):
        (path / name).write_text("x")
    with sqlite3.connect(path / "pool.sqlite") as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    elsewhere.write_text("x")
    (path / "link").symlink_to(elsewhere)
    (path / "program").write_text("x")
    (path / "program").chmod(0o755)
    assert open_to_others(path)
    said: list[str] = []
    for _ in range(2):
        with data_directory(path, say=said.append):
            pass
    assert open_to_others(path) == []
    assert mode(path / "program") == 0o700
    assert mode(elsewhere) == 0o644
    assert len(said) == 1
    assert str(path) in said[0]


def test_a_directory_that_was_no_data_directory_is_closed_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "thesis").write_text("x")
    with data_directory(path):
        (path / "new").touch()
    assert mode(path) == 0o700
    assert mode(path / "thesis") == 0o644
    assert mode(path / "new") == 0o600


def test_what_is_of_somebody_else_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "theirs"
    path.mkdir()
    (path / "x").touch()
    monkeypatch.setattr(os, "getuid", lambda: 1 + path.stat().st_uid)
    assert not make_private(path, was_ours=True)
    assert mode(path) == 0o755
    assert mode(path / "x") == 0o644


def test_what_lies_outside_is_as_readable_as_its_owner_wants_it(tmp_path: Path) -> None:
    path, cache = tmp_path / "node", tmp_path / "cache"
    os.umask(0o002)
    with data_directory(path):
        assert shared_umask() == 0o002
        with shared_files():
            cache.mkdir()
            (cache / "model").touch()
        with private_files(), shared_files():
            (cache / "more").touch()
        command = (
            "from swarm.storage import shared_files\nfrom pathlib import Path\n"
            "Path('own').touch()\nwith shared_files(): Path('../cache/childs').touch()"
        )
        subprocess.run(
            [sys.executable, "-c", command],
            cwd=path,
            check=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        copied = path / "version"
        (copied / "deep").mkdir(parents=True)
        (copied / "deep" / "x").touch()
        out = copied.rename(tmp_path / "out")
        make_shared(out)
    assert mode(cache) == 0o775
    assert {mode(each) for each in cache.iterdir()} == {0o664}
    assert open_to_others(path) == []
    assert (mode(out), mode(out / "deep"), mode(out / "deep" / "x")) == (0o775, 0o775, 0o664)
    assert UMASK_VARIABLE not in os.environ
    assert os.umask(0o002) == 0o002


def test_a_wish_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "coordinator"
    drain(path, "worker", undo=False)
    assert open_to_others(path) == []


def test_nonsense_in_the_environment_closes_nothing_and_opens_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in ("", "x", "9", "-1"):
        monkeypatch.setenv(UMASK_VARIABLE, text)
        assert shared_umask() in (0o022, 0o777)
