"""Items from peer to peer: chunk by chunk, each checked, resumed, at a pace, never from a liar."""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from node.envs.data import items as store
from node.envs.data.dataset import rules_of
from node.hosting.run_data import _check_came, _judge, held_data
from swarm.errors import ConfigError, Reject, RemoteProtocolError, RequestRefused
from swarm.identity import Identity, PeerId
from swarm.limits.quotas import RATES, Kind
from swarm.peers import run_data
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.reputation import Ledger
from swarm.peers.run_data import HeldData, ask_for_manifest, fetch_chunks, serve_data
from swarm.transport.base import Transport
from swarm.wire.messages import DATA_CHUNK_BYTES_MAX, chunks_of, data_id, manifest_of
from tests.contract.transport_makers import open_memory_hosts
from tests.unit.test_data import found, sha256_in

IDS = [Identity.generate() for _ in range(2)]
CONTENT = b"".join(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(20_000))
MANIFEST = manifest_of(CONTENT, items=7)
DATA = data_id(MANIFEST)
CHUNKS = chunks_of(len(CONTENT))


def held(content: bytes) -> HeldData:
    async def read(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    return HeldData(MANIFEST, read)


@asynccontextmanager
async def served(content: bytes = CONTENT) -> AsyncIterator[tuple[Transport, PeerId]]:
    """A transport that is connected to a peer with the data, and who that is."""
    async with open_memory_hosts(IDS) as (asker, server):
        serve_data(server, ConnectionGater(server, Ledger()), {DATA: held(content)})
        peer = await asker.connect(server.addresses()[0], timeout_s=5.0)
        yield asker, peer


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    return partial(trio.run, clock=trio.testing.MockClock(autojump_threshold=0.01))


def test_all_chunks_come_and_only_those_that_are_missing(virtual: Callable[..., object]) -> None:
    got: dict[int, bytes] = {}

    async def keep(chunk: int, content: bytes) -> None:
        got[chunk] = content

    async def main() -> None:
        async with served() as (transport, peer):
            manifest = await ask_for_manifest(transport, peer, DATA)
            assert manifest == MANIFEST
            await fetch_chunks(transport, peer, DATA, manifest, [1], keep)
            assert list(got) == [1]
            await fetch_chunks(transport, peer, DATA, manifest, [0, 2], keep)

    virtual(main)
    assert CHUNKS == 3
    assert b"".join(got[chunk] for chunk in range(CHUNKS)) == CONTENT


@pytest.mark.parametrize("at", [0, DATA_CHUNK_BYTES_MAX, len(CONTENT) - 1])
def test_one_wrong_byte_is_refused_and_its_chunk_not_kept(
    virtual: Callable[..., object], at: int
) -> None:
    wrong = bytearray(CONTENT)
    wrong[at] ^= 1
    got: list[int] = []

    async def keep(chunk: int, content: bytes) -> None:
        got.append(chunk)

    async def main() -> None:
        async with served(bytes(wrong)) as (transport, peer):
            with pytest.raises(RemoteProtocolError) as refused:
                await fetch_chunks(transport, peer, DATA, MANIFEST, range(CHUNKS), keep)
            assert refused.value.reason is Reject.WRONG_HASH

    virtual(main)
    assert got == list(range(at // DATA_CHUNK_BYTES_MAX))


def test_a_manifest_of_other_data_is_refused(virtual: Callable[..., object]) -> None:
    other = manifest_of(CONTENT + b"x", items=7)

    async def main() -> None:
        async with open_memory_hosts(IDS) as (asker, server):
            gater = ConnectionGater(server, Ledger())
            serve_data(server, gater, {DATA: HeldData(other, held(CONTENT).read)})
            peer = await asker.connect(server.addresses()[0], timeout_s=5.0)
            with pytest.raises(RemoteProtocolError, match="wrong_hash"):
                await ask_for_manifest(asker, peer, DATA)
            with pytest.raises(RequestRefused, match="no data of this node's run"):
                await ask_for_manifest(asker, peer, bytes(32))

    virtual(main)


def test_the_hash_is_also_of_how_many_items_there_are() -> None:
    assert len({data_id(manifest_of(CONTENT, items)) for items in (6, 7)}) == 2


@pytest.mark.slow
def test_who_asks_faster_than_the_quota_is_refused_and_the_pace_is_below_it(
    virtual: Callable[..., object],
) -> None:
    burst = int(RATES[Kind.DATA].burst)

    async def main() -> None:
        async with served() as (transport, peer):
            refused = 0
            for _ in range(2 * burst):
                try:
                    await ask_for_manifest(transport, peer, DATA)
                except RequestRefused:
                    refused += 1
            assert 0 < refused < burst + 1

        async def keep(chunk: int, content: bytes) -> None:
            assert content

        async with served() as (transport, peer):
            most = [2] * (burst + 40)
            await fetch_chunks(transport, peer, DATA, MANIFEST, most, keep)

    virtual(main)


def test_without_a_pace_the_quota_would_be_hit(
    virtual: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "PACE_S", 0.0)
    monkeypatch.setattr(run_data, "REFUSALS_MAX", 0)

    async def keep(chunk: int, content: bytes) -> None:
        assert content

    async def main() -> None:
        async with served() as (transport, peer):
            most = [2] * (int(RATES[Kind.DATA].burst) + 40)
            with pytest.raises(RequestRefused):
                await fetch_chunks(transport, peer, DATA, MANIFEST, most, keep)

    virtual(main)


# --- on disk ----------------------------------------------------------------------------------


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_own_cache")
def test_what_came_is_there_after_a_restart_and_what_was_torn_is_not() -> None:
    arriving = store.Arriving(DATA.hex(), MANIFEST)
    assert list(arriving.missing()) == [0, 1, 2]
    for chunk in (0, 2):
        begin = chunk * DATA_CHUNK_BYTES_MAX
        arriving.write(chunk, CONTENT[begin : begin + DATA_CHUNK_BYTES_MAX])
    arriving.write(1, CONTENT[DATA_CHUNK_BYTES_MAX:][: DATA_CHUNK_BYTES_MAX // 2])
    again = store.Arriving(DATA.hex(), MANIFEST)
    assert list(again.missing()) == [1]
    again.write(1, CONTENT[DATA_CHUNK_BYTES_MAX:][:DATA_CHUNK_BYTES_MAX])
    assert not list(again.missing())
    assert again.whole() == CONTENT
    assert not store.is_here(DATA.hex())
    again.finish()
    assert store.path_of(DATA.hex()).read_bytes() == CONTENT
    assert store.path_of(DATA.hex()).stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    "hostile",
    [
        b'{"answer":"1","question":"1"}\n{"answer":"1"}\n',
        b'{"answer":"1","note":"x","question":"1"}\n',
        b'{"answer": "1","question":"1"}\n',
        b'{"answer":"1","question":"1"}\n\n',
        b'{"answer":"1","question":"1"}',
        b'{"answer":"1","question":"1"}\r\n',
        b'{"answer":"x","question":"1"}\n',
        b'{"answer":"1","question":"\\u001e[]"}\n',
        b'{"answer":"1","question":"1","question":"1"}\n',
        b"[" * 10_000 + b"\n",
        b"\xff\n",
    ],
)
def test_items_that_no_file_comes_to_are_not_put_in_place(tmp_path: Path, hostile: bytes) -> None:
    """Their hash is right: whoever founded the run made it so."""
    rules = rules_of(found(tmp_path).environments[0].parameters)
    manifest = manifest_of(hostile, items=max(1, hostile.count(b"\n")))
    named = rules.model_copy(update={"sha256": data_id(manifest).hex()})
    arriving = store.Arriving(named.sha256, manifest)
    arriving.write(0, hostile)
    with pytest.raises(ConfigError) as refused:
        _judge(arriving, named, manifest)
    assert str(refused.value).isprintable()
    assert not store.is_here(named.sha256)
    assert not list(store.path_of(named.sha256).parent.glob("*.part"))


@pytest.mark.usefixtures("_own_cache")
def test_a_node_hands_on_the_items_of_its_run(tmp_path: Path) -> None:
    run = found(tmp_path)

    async def main() -> None:
        ((data, mine),) = held_data(run, trio.to_thread.run_sync).items()
        assert data.hex() == sha256_in(run)
        content = await mine.read(0, mine.manifest.size_bytes)
        assert data_id(manifest_of(content, mine.manifest.items)) == data
        _check_came(content, rules_of(run.environments[0].parameters), mine.manifest)

    trio.run(main)
