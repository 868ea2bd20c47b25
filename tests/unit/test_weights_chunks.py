"""The store of chunks: what is verified, what stays, what goes, and what kill -9 leaves."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    Reject,
    RemoteProtocolError,
    StorageFailed,
    StoreFull,
)
from swarm.weights import chunk_store as chunks
from swarm.weights.chunk_store import AT_ONCE_BYTES_MAX, PIN_SETS_MAX, ChunkStore
from swarm.weights.manifest import ChunkRef
from tests.simulation.weights_hosts import files_up_to
from tests.unit.chunk_child import CHUNK_BYTES
from tests.weights_samples import figures_of

ROOT = Path(__file__).parents[2]
KILLS = 5


def chunk(number: int, size_bytes: int = 1000) -> bytes:
    return bytes([number]) * size_bytes


def ref(data: bytes) -> ChunkRef:
    return ChunkRef(hashlib.sha256(data).digest(), len(data))


def put(store: ChunkStore, *numbers: int) -> None:
    for number in numbers:
        store.put(ref(chunk(number)).sha256, chunk(number))


def put_all(store: ChunkStore, chunks: Sequence[bytes]) -> None:
    for data in chunks:
        store.put(ref(data).sha256, data)


def held(store: ChunkStore, *numbers: int) -> list[int]:
    """Which of them can be had."""
    return [n for n in numbers if store.get(ref(chunk(n)).sha256) == chunk(n)]


def path_of(directory: Path, data: bytes) -> Path:
    name = ref(data).sha256.hex()
    return directory / "chunks" / name[:2] / name


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    """With room for four chunks."""
    with ChunkStore(tmp_path, 4000) as opened:
        yield opened


def test_what_was_put_can_be_had(store: ChunkStore) -> None:
    put(store, 1, 2)
    assert held(store, 1, 2, 3) == [1, 2]
    assert store.has(ref(chunk(1)))
    assert store.missing([ref(chunk(n)) for n in (3, 2, 4)]) == [ref(chunk(3)), ref(chunk(4))]


def test_nothing_unverified_is_stored(store: ChunkStore, tmp_path: Path) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        store.put(ref(chunk(1)).sha256, chunk(2))
    assert caught.value.reason is Reject.WRONG_HASH
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "lock"]
    assert figures_of(store).held_bytes == 0


def test_a_chunk_of_two_versions_is_stored_once(store: ChunkStore, tmp_path: Path) -> None:
    store.pin("v1", [ref(chunk(1)), ref(chunk(2))])
    store.pin("v2", [ref(chunk(2)), ref(chunk(3))])
    put(store, 1, 2, 2, 3, 2)
    figures = figures_of(store)
    assert (figures.chunks, figures.held_bytes, figures.stored) == (3, 3000, 3)
    assert len([path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]) == 3
    store.unpin("v1")
    put(store, 4, 5)
    assert held(store, 1, 2, 3, 4, 5) == [2, 3, 4, 5]


def test_at_once_gives_what_is_verified_and_as_long_as_it_was(
    store: ChunkStore, tmp_path: Path
) -> None:
    data = chunk(1)
    name = ref(data).sha256
    assert store.get_at_once(name) is None
    put(store, 1)
    assert store.get_at_once(name) == data
    for changed in (data[:-1], data + b"1"):
        path_of(tmp_path, data).write_bytes(changed)
        assert store.get_at_once(name) is None
    path_of(tmp_path, data).unlink()
    assert store.get_at_once(name) is None
    assert store.get(name) is None  # and that has noticed
    assert figures_of(store).damaged == 1


def test_at_once_gives_nothing_that_nobody_has_verified_yet(tmp_path: Path) -> None:
    data = chunk(1)
    name = ref(data).sha256
    with ChunkStore(tmp_path, 4000) as before:
        put(before, 1)
    with ChunkStore(tmp_path, 4000) as store:
        assert store.get_at_once(name) is None
        assert store.get(name) == data
        assert store.get_at_once(name) == data


def test_at_once_waits_for_no_thread_and_reads_nothing_large(
    store: ChunkStore, tmp_path: Path
) -> None:
    put(store, 1)
    with store._lock:
        assert store.get_at_once(ref(chunk(1)).sha256) is None
    assert store.get_at_once(ref(chunk(1)).sha256) == chunk(1)
    with ChunkStore(tmp_path / "large", 2 * AT_ONCE_BYTES_MAX) as roomy:
        for size_bytes, is_given in ((AT_ONCE_BYTES_MAX, True), (AT_ONCE_BYTES_MAX + 1, False)):
            data = bytes(size_bytes)
            put_all(roomy, [data])
            assert (roomy.get_at_once(ref(data).sha256) is not None) is is_given
            roomy._remove(ref(data).sha256)


def test_what_is_read_at_once_counts_as_used(store: ChunkStore) -> None:
    put(store, 1, 2, 3, 4)
    assert store.get_at_once(ref(chunk(1)).sha256) == chunk(1)
    put(store, 5)
    assert held(store, 1, 2, 3, 4, 5) == [1, 3, 4, 5]


# --- room --------------------------------------------------------------------------------------


def test_the_least_recently_used_leaves_first(store: ChunkStore, tmp_path: Path) -> None:
    put(store, 1, 2, 3, 4)
    assert held(store, 1) == [1]
    put(store, 5)
    assert held(store, 1, 2, 3, 4, 5) == [1, 3, 4, 5]
    assert figures_of(store).evicted == 1
    assert not path_of(tmp_path, chunk(2)).exists()


def test_what_nobody_needs_leaves_though_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a learner that publishes for days: its version, and as much again."""
    monkeypatch.setattr(chunks, "SPARE_BYTES_MIN", 0)
    with ChunkStore(tmp_path, 1_000_000) as store:
        for version in range(10):
            numbers = range(3 * version, 3 * version + 3)
            store.pin("serves", [ref(chunk(number)) for number in numbers])
            put(store, *numbers)
        assert held(store, *range(30)) == list(range(24, 30))
        monkeypatch.setattr(chunks, "SPARE_BYTES_MIN", 8_000)
        put(store, *range(10))
        assert len(held(store, *range(30))) == 11
        assert held(store, 27, 28, 29) == [27, 28, 29]


def test_pinned_chunks_stay(store: ChunkStore) -> None:
    store.pin("current", [ref(chunk(n)) for n in (1, 2)])
    put(store, *range(1, 9))
    assert held(store, *range(1, 9)) == [1, 2, 7, 8]


def test_pins_that_fill_the_store(store: ChunkStore) -> None:
    store.pin("current", [ref(chunk(n)) for n in (1, 2)])
    put(store, 1, 2)
    with pytest.raises(StoreFull, match="5000 bytes"):
        store.pin("next", [ref(chunk(n)) for n in (2, 3, 4, 5)])
    store.pin("next", [ref(chunk(n)) for n in (2, 3, 4)])
    put(store, 3, 4)
    with pytest.raises(StoreFull, match="4000 of 4000 are in use"):
        put(store, 6)
    assert held(store, 1, 2, 3, 4, 6) == [1, 2, 3, 4]
    store.unpin("next")
    put(store, 6, 7)
    assert held(store, 1, 2, 6, 7) == [1, 2, 6, 7]


def test_a_pin_that_fails_leaves_the_one_before(store: ChunkStore) -> None:
    store.pin("current", [ref(chunk(1))])
    with pytest.raises(StoreFull):
        store.pin("current", [ref(chunk(n)) for n in range(5)])
    put(store, 1, 2, 3, 4, 5)
    assert held(store, 1, 2) == [1]


def test_pins_are_bounded(store: ChunkStore) -> None:
    for number in range(PIN_SETS_MAX):
        store.pin(str(number), [])
    with pytest.raises(LocalProtocolError):
        store.pin("one more", [])
    store.unpin("0")
    store.pin("one more", [])


def test_a_chunk_over_the_bound(store: ChunkStore) -> None:
    put(store, 1)
    large = chunk(2, 4001)
    with pytest.raises(StoreFull):
        store.put(ref(large).sha256, large)
    assert figures_of(store).held_bytes <= 1000


# --- the disk ----------------------------------------------------------------------------------


def test_a_file_that_the_disk_cuts_short_is_no_chunk(tmp_path: Path) -> None:
    data = chunk(1, 200_000)
    with ChunkStore(tmp_path, 10**6) as store:
        with files_up_to(100_000), pytest.raises(StoreFull):
            store.put(ref(data).sha256, data)
        assert store.get(ref(data).sha256) is None
        assert list((tmp_path / "partial").iterdir()) == []
        store.put(ref(data).sha256, data)
        assert store.get(ref(data).sha256) == data
        assert figures_of(store).held_bytes == len(data)


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(directory)]
    if os.geteuid() or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_on_a_full_disk_old_chunks_make_room_and_pinned_ones_stay(tmp_path: Path) -> None:
    size_bytes = 100 * 1024
    chunks = [chunk(number, size_bytes) for number in range(12)]
    with small_disk(tmp_path, 1024 * 1024) as disk, ChunkStore(disk, 10**9) as store:
        store.pin("current", map(ref, chunks[:2]))
        put_all(store, chunks)
        assert [store.get(ref(data).sha256) == data for data in chunks[:2]] == [True, True]
        assert figures_of(store).evicted > 0
        store.pin("in flight", map(ref, chunks))
        with pytest.raises(StoreFull, match="No space left"):
            put_all(store, chunks)
        assert figures_of(store).held_bytes == size_bytes * len(
            [data for data in chunks if store.get(ref(data).sha256) == data]
        )


def test_a_disk_that_cannot_be_written_is_another_matter(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, 10**6) as store:
        (tmp_path / "partial").rmdir()
        (tmp_path / "partial").write_text("no directory")
        with pytest.raises(StorageFailed):
            put(store, 1)
        assert figures_of(store).held_bytes == 0
        (tmp_path / "partial").unlink()
        (tmp_path / "partial").mkdir()
        put(store, 1)
        assert held(store, 1) == [1]


def test_two_processes_cannot_have_it(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, 4000), pytest.raises(ConfigError, match="in use by another"):
        ChunkStore(tmp_path, 4000)
    ChunkStore(tmp_path, 4000).close()


@pytest.mark.parametrize("in_the_way", [".", "chunks"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, in_the_way: str) -> None:
    path = tmp_path / "store" / in_the_way
    path.parent.mkdir(exist_ok=True)
    path.write_text("a file")
    with pytest.raises(StorageFailed, match="store"):
        ChunkStore(tmp_path / "store", 4000)


# --- after a restart ---------------------------------------------------------------------------


def test_a_restart_finds_what_was_stored_in_its_order(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, 4000) as store:
        put(store, 4, 3, 2, 1)
    for at, number in enumerate((4, 3, 2, 1)):
        os.utime(path_of(tmp_path, chunk(number)), (at, at))
    with ChunkStore(tmp_path, 4000) as store:
        assert figures_of(store).unverified == 4
        put(store, 5)
        assert store.missing([ref(chunk(n)) for n in (1, 2, 3, 4, 5)]) == [ref(chunk(4))]
        assert figures_of(store).unverified == 0
        assert figures_of(store).damaged == 0


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[:-1],
    "empty": lambda data: b"",
    "one bit": lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
    "longer": lambda data: data + b"\x00",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("first_use", ["get", "missing"])
def test_damage_is_found_at_the_first_use(
    tmp_path: Path, first_use: str, damage: Callable[[bytes], bytes]
) -> None:
    with ChunkStore(tmp_path, 4000) as store:
        put(store, 1, 2)
    path_of(tmp_path, chunk(1)).write_bytes(damage(chunk(1)))
    with ChunkStore(tmp_path, 4000) as store:
        if first_use == "get":
            assert store.get(ref(chunk(1)).sha256) is None
        refs = [ref(chunk(1)), ref(chunk(2))]
        assert store.missing(refs) == refs[:1]
        assert (figures_of(store).damaged, figures_of(store).held_bytes) == (1, 1000)
        assert not path_of(tmp_path, chunk(1)).exists()
        put(store, 1)
        assert store.missing(refs) == []


def test_a_fetched_chunk_replaces_one_that_was_damaged(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, 4000) as store:
        put(store, 1)
    path_of(tmp_path, chunk(1)).write_bytes(chunk(1)[:-1])
    with ChunkStore(tmp_path, 4000) as store:
        put(store, 1)
        assert held(store, 1) == [1]
        assert figures_of(store).held_bytes == 1000


def test_a_file_that_somebody_removed_is_missing(store: ChunkStore, tmp_path: Path) -> None:
    put(store, 1)
    path_of(tmp_path, chunk(1)).unlink()
    assert store.get(ref(chunk(1)).sha256) is None
    assert store.missing([ref(chunk(1))]) == [ref(chunk(1))]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "chunks" / "ab").mkdir(parents=True)
    for name in ("notes.txt", "AB" * 32, "ab" * 31):
        (tmp_path / "chunks" / "ab" / name).write_text("mine")
    with ChunkStore(tmp_path, 4000) as store:
        assert figures_of(store).chunks == 0
        put(store, *range(6))
    assert (tmp_path / "chunks" / "ab" / "notes.txt").read_text() == "mine"


def _child(directory: Path, *numbers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.unit.chunk_child", str(directory), *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


def _refs(lines: Iterable[bytes]) -> list[ChunkRef]:
    """The chunks of the whole lines: a kill may cut the last."""
    whole = [line for line in lines if line.endswith(b"\n")]
    return [ChunkRef(bytes.fromhex(line.decode()), CHUNK_BYTES) for line in whole]


def test_kill_9_loses_nothing_verified_and_leaves_nothing_else(tmp_path: Path) -> None:
    known: list[ChunkRef] = []
    for attempt in range(KILLS):
        with _child(tmp_path, 1000 * attempt) as child:
            assert child.stdout is not None
            stored = [child.stdout.readline() for _ in range(2)]
            child.send_signal(signal.SIGKILL)
            stored += child.stdout.readlines()
        known += _refs(stored)
        with ChunkStore(tmp_path, 1 << 40) as store:
            assert store.missing(known) == []
            assert list((tmp_path / "partial").iterdir()) == []
            # one may have got its name while the kill came
            assert len(known) <= figures_of(store).chunks <= len(known) + attempt + 1
            assert figures_of(store).damaged == 0


def test_a_chunk_whose_write_was_cut_short_is_not_there_and_leaves_nothing(tmp_path: Path) -> None:
    with _child(tmp_path, 0, 3) as child:
        assert child.stdout is not None
        known = _refs(child.stdout.readlines())
    assert child.returncode == -signal.SIGXFSZ
    assert [path.stat().st_size for path in (tmp_path / "partial").iterdir()] == [CHUNK_BYTES // 2]
    with ChunkStore(tmp_path, 1 << 40) as store:
        assert store.missing(known) == []
        assert figures_of(store).chunks == len(known) == 3
        assert list((tmp_path / "partial").iterdir()) == []


def test_threads_share_it(tmp_path: Path) -> None:
    """Puts, reads and evictions at once: nothing wrong is read, and the books agree."""
    chunks = [chunk(number, 1000 + number) for number in range(40)]

    def work(worker: int) -> None:
        for step in range(400):
            data = chunks[(worker * 7 + step * (worker + 1)) % len(chunks)]
            if step % 2:
                store.put(ref(data).sha256, data)
            else:
                assert store.get(ref(data).sha256) in (None, data)

    with ChunkStore(tmp_path, 20_000) as store:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        figures = figures_of(store)
        files = [path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]
        assert figures.held_bytes == sum(path.stat().st_size for path in files) <= 20_000
        assert figures.chunks == len(files)
        assert (figures.damaged, figures.evicted > 0) == (0, True)
        assert all(store.get(bytes.fromhex(path.name)) is not None for path in files)
