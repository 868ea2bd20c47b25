"""From a directory through chunks to the same directory, whatever goes wrong on the way."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import pytest

from swarm.errors import (
    ConfigError,
    NoRoute,
    RemoteProtocolError,
    StorageFailed,
    StoreFull,
    WeightsMismatch,
)
from swarm.weights import manifest as manifest_wire
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.manifest import Artifact, ChunkRef, Manifest, open_weights
from swarm.weights.publisher import opened
from swarm.weights.version_store import (
    BASE_AGES,
    Step,
    Versions,
    adopt,
    base_versions,
    cheapest_route,
    make,
    offer,
)
from swarm.wire.messages import ARTIFACTS_MAX
from tests.weights_files import tree, write_model
from tests.wire_samples import ALICE

ROOM_BYTES = 10**8


class Publisher:
    """Has versions 1 to 4, each after the first is it with some weights moved."""

    def __init__(self, directory: Path) -> None:
        self.sources = directory / "sources"
        self.versions = Versions(directory / "versions", keep=9)
        self.store = ChunkStore(directory / "store", ROOM_BYTES)
        self.bodies: dict[int, bytes] = {}
        for version in (1, 2, 3, 4):
            self.publish(version)

    def publish(self, version: int, files: Mapping[str, str] = MappingProxyType({})) -> None:
        source = self.sources / str(version)
        write_model(source, version, base=1 if version > 1 else None)
        for name, content in files.items():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_text(content)
        new = open_weights(source)
        held = {local.version: local.directory for local in self.versions.held()}
        bases = [(each, open_weights(held[each])) for each in base_versions(version, held)]

        def describe(artifacts: tuple[Artifact, ...]) -> Manifest:
            name, policy = "sample-1", "actor"
            return Manifest(name, policy, version, ALICE.peer_id, 1, new.specs, artifacts)

        self.bodies[version] = manifest_wire.encode_manifest(
            offer(new, bases, self.store, describe)
        )
        adopt(new, self.bodies[version], self.versions, version)

    @property
    def manifests(self) -> dict[int, Manifest]:
        return {
            version: manifest_wire.decode_manifest(body) for version, body in self.bodies.items()
        }


@dataclass
class Peer:
    """Gets chunks from the publisher, and counts what that costs."""

    publisher: Publisher
    versions: Versions
    store: ChunkStore
    fetched_bytes: int = 0

    def route(self, wanted: int) -> tuple[Step, ...]:
        return cheapest_route(
            wanted, self.versions.states(), self.publisher.manifests, self.store.has
        )

    def fetch(self, refs: tuple[ChunkRef, ...], at_most: int | None = None) -> None:
        for ref in self.store.missing(refs)[:at_most]:
            chunk = self.publisher.store.get(ref.sha256)
            assert chunk is not None
            self.store.put(ref.sha256, chunk)
            self.fetched_bytes += ref.size_bytes

    def get(self, wanted: int, threads: int = 1) -> list[tuple[int | None, int]]:
        """The way that was taken."""
        steps = self.route(wanted)
        for step in steps:
            self.fetch(step.artifact.chunks)
            body, manifest = self.publisher.bodies[step.version], self.publisher.manifests
            make(step, body, manifest[step.version], self.versions, self.store, threads)
        return [(step.artifact.base_version, step.version) for step in steps]

    def has_exactly(self, version: int) -> bool:
        local = self.versions.get(version)
        assert local is not None
        return tree(local.directory) == tree(self.publisher.sources / str(version))


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    made = Publisher(tmp_path_factory.mktemp("publisher"))
    yield made
    made.store.close()


@pytest.fixture
def peer(publisher: Publisher, tmp_path: Path) -> Iterator[Peer]:
    with ChunkStore(tmp_path / "store", ROOM_BYTES) as store:
        yield Peer(publisher, Versions(tmp_path / "versions", keep=9), store)


def test_bases_are_powers_of_two_back() -> None:
    assert base_versions(20, range(20)) == (19, 18, 16, 12, 4)
    assert base_versions(20, [19, 17, 12]) == (19, 12)
    assert base_versions(0, []) == ()
    assert len(BASE_AGES) + 1 == ARTIFACTS_MAX


def test_what_is_offered(publisher: Publisher) -> None:
    bases = [each.base_version for each in publisher.manifests[4].artifacts]
    assert bases == [None, 3, 2]
    full, *deltas = publisher.manifests[4].artifacts
    assert all(delta.size_bytes < full.size_bytes for delta in deltas)
    for version, body in publisher.bodies.items():
        assert publisher.versions.manifest_body(version) == body
        held = publisher.versions.get(version)
        assert held is not None
        assert tree(held.directory) == tree(publisher.sources / str(version))


def test_a_delta_that_saves_nothing_is_not_offered(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("other", 2)):
        write_model(tmp_path / name, seed, size=5000)
    new, base = open_weights(tmp_path / "other"), open_weights(tmp_path / "one")
    offered: list[Artifact] = []

    def describe(artifacts: tuple[Artifact, ...]) -> Manifest:
        offered.extend(artifacts)
        return Manifest("r", "p", 2, ALICE.peer_id, 1, new.specs, artifacts)

    with ChunkStore(tmp_path / "store", ROOM_BYTES) as store:
        offer(new, [(1, base)], store, describe)
    full = offered[0]
    assert all(each.size_bytes < full.size_bytes for each in offered[1:])


@pytest.mark.parametrize("threads", [1, 4])
def test_from_nothing_and_then_by_deltas(peer: Peer, threads: int) -> None:
    assert peer.get(1, threads) == [(None, 1)]
    full_bytes = peer.fetched_bytes
    assert peer.get(2, threads) == [(1, 2)]
    assert 0 < peer.fetched_bytes - full_bytes < full_bytes / 2
    assert peer.get(4, threads) == [(2, 4)]
    assert all(peer.has_exactly(version) for version in (1, 2, 4))


def test_a_chunk_of_two_versions_is_fetched_once(peer: Peer) -> None:
    """Two full snapshots: `frozen` and other tensors are the same in both."""
    first, second = (peer.publisher.manifests[version].artifacts[0] for version in (1, 2))
    shared = {ref.sha256 for ref in first.chunks} & {ref.sha256 for ref in second.chunks}
    shared_bytes = sum(ref.size_bytes for ref in second.chunks if ref.sha256 in shared)
    assert shared_bytes > 0
    peer.fetch(first.chunks)
    peer.fetch(second.chunks)
    assert peer.fetched_bytes == first.size_bytes + second.size_bytes - shared_bytes


def test_a_restart_in_the_middle_fetches_nothing_twice(peer: Peer, tmp_path: Path) -> None:
    step = peer.route(1)[0]
    peer.fetch(step.artifact.chunks, at_most=len(step.artifact.chunks) // 2)
    before = peer.fetched_bytes
    peer.versions.staging(1)
    peer.store.close()
    with ChunkStore(tmp_path / "store", ROOM_BYTES) as store:
        again = Peer(peer.publisher, Versions(tmp_path / "versions"), store)
        assert again.get(1) == [(None, 1)]
        assert again.fetched_bytes == step.artifact.size_bytes - before
        assert again.has_exactly(1)


def test_a_base_that_changed_is_named_and_gone_around(peer: Peer) -> None:
    peer.get(1)
    local = peer.versions.get(1)
    assert local is not None
    path = local.directory / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(WeightsMismatch, match=r"base 1: 'layer\.weight' is not what it was"):
        peer.get(2)
    assert peer.versions.get(2) is None
    assert peer.get(2)[0][0] is None
    assert peer.has_exactly(2)


def test_a_base_that_was_cut_short_is_named_and_gone_around(peer: Peer) -> None:
    peer.get(1)
    local = peer.versions.get(1)
    assert local is not None
    (local.directory / "model-1.safetensors").unlink()
    with pytest.raises(WeightsMismatch, match="base 1: "):
        peer.get(2)
    assert peer.get(2)[0][0] is None
    assert peer.has_exactly(2)


def test_a_base_of_another_content_is_refused_by_name(peer: Peer) -> None:
    peer.get(1)
    manifest = peer.publisher.manifests[2]
    deltas = tuple(each for each in manifest.artifacts if each.base_version == 1)
    forged = replace(manifest, artifacts=(replace(deltas[0], base_state=bytes(32)),))
    with pytest.raises(NoRoute, match="base 1 is another here"):
        cheapest_route(2, peer.versions.states(), {2: forged}, peer.store.has)


def test_chunks_of_another_version_do_not_make_this_one(peer: Peer, tmp_path: Path) -> None:
    """A publisher whose chunks are not those of its manifest is found out by the hashes."""
    step = peer.route(2)[-1]
    other = peer.route(1)[0].artifact
    peer.fetch(other.chunks)
    body, manifest = peer.publisher.bodies[2], peer.publisher.manifests[2]
    with pytest.raises((WeightsMismatch, RemoteProtocolError)):
        make(replace(step, artifact=other), body, manifest, peer.versions, peer.store)
    assert peer.versions.held() == ()
    assert list((tmp_path / "versions" / "versions").iterdir()) == []


CODE = {"auto_map": {"AutoModelForCausalLM": "somebody/else--modeling.Model"}}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", json.dumps(CODE)),
        ("config.json", json.dumps({"text_config": [CODE]})),
        ("tokenizer_config.json", json.dumps({"auto_map": ["tokenization.Tokenizer", None]})),
        ("parts/config.json", json.dumps(CODE).replace("auto", "\\u0061uto")),
        ("config.json", json.dumps(CODE) + " " * (16 << 20)),
    ],
)
def test_a_version_that_names_code_is_refused_on_both_sides(tmp_path, name, content):
    publisher = Publisher(tmp_path / "publisher")
    publisher.publish(5, {name: content})
    with ChunkStore(tmp_path / "store", ROOM_BYTES) as store:
        peer = Peer(publisher, Versions(tmp_path / "versions"), store)
        with pytest.raises(RemoteProtocolError, match="names code of its own"):
            peer.get(5)
        assert peer.versions.get(5) is None
        peer.get(4)
    publisher.store.close()
    with pytest.raises(ConfigError, match=r"names code of its own \(auto_map\)"):
        opened(publisher.sources / "5")


@pytest.mark.parametrize(
    "content", ['{"auto_map": null}', '{"a": "auto_map"}', "no JSON", "[" * 100_000]
)
def test_what_names_no_code_is_published(tmp_path, content):
    publisher = Publisher(tmp_path / "publisher")
    publisher.publish(5, {"config.json": content, "vocab.json": '{"auto_map": 3}'})
    publisher.store.close()
    assert opened(publisher.sources / "5").specs


def test_a_chunk_that_vanished(peer: Peer) -> None:
    step = peer.route(1)[0]
    peer.fetch(step.artifact.chunks, at_most=len(step.artifact.chunks) - 1)
    body, manifest = peer.publisher.bodies[1], peer.publisher.manifests[1]
    with pytest.raises(StorageFailed, match="no longer there"):
        make(step, body, manifest, peer.versions, peer.store)
    assert peer.versions.held() == ()


def test_a_store_that_is_too_small(publisher: Publisher, tmp_path: Path) -> None:
    with ChunkStore(tmp_path / "store", 50_000) as store:
        small = Peer(publisher, Versions(tmp_path / "versions"), store)
        with pytest.raises(StoreFull):
            store.pin("next", small.route(1)[0].artifact.chunks)
        with pytest.raises((StoreFull, StorageFailed)):
            small.get(1)
        assert small.versions.held() == ()


def test_the_source_must_not_change_while_it_is_published(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 1)
    new = open_weights(tmp_path / "model")
    artifact = Artifact(None, None, (ChunkRef(bytes(32), 100),))
    manifest = Manifest("r", "p", 1, ALICE.peer_id, 1, new.specs, (artifact,))
    path = tmp_path / "model" / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    versions = Versions(tmp_path / "versions")
    with pytest.raises(WeightsMismatch):
        adopt(new, manifest_wire.encode_manifest(manifest), versions, 1)
    assert versions.held() == ()
