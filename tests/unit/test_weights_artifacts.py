import hashlib
import random
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.errors import Reject, RemoteProtocolError, StorageFailed, WeightsMismatch
from swarm.weights import artifacts
from swarm.weights.artifacts import (
    CHUNK_BYTES_MAX,
    CHUNK_TARGET_MAX,
    CHUNK_TARGET_MIN,
    MAGIC,
    Patcher,
    encode_artifact,
    estimated_bytes,
    read_chunk,
    suggested_chunk_bytes,
)
from swarm.weights.entropy_coding import PayloadWriter
from swarm.weights.manifest import WeightsDirectory, open_weights, state_of
from tests.weights_files import bf16, header_of, stepped, tree, write_model, write_tensors

CHUNK = CHUNK_TARGET_MIN


@pytest.fixture
def base(tmp_path: Path) -> WeightsDirectory:
    write_model(tmp_path / "base", 1, size=400_000)
    return open_weights(tmp_path / "base")


@pytest.fixture
def new(tmp_path: Path) -> WeightsDirectory:
    write_model(tmp_path / "new", 2, base=1, size=400_000)
    return open_weights(tmp_path / "new")


def patched(
    new: WeightsDirectory, base: WeightsDirectory | None, chunks: list[bytes], output: Path
) -> WeightsDirectory:
    state = None if base is None else state_of(base.specs)
    patcher = Patcher(new.specs, base, output, base_state=state)
    for chunk in chunks:
        patcher.apply(chunk)
    return patcher.finish()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("full", [False, True])
def test_chunks_in_any_order_make_the_same_files(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory, seed: int | None, full: bool
) -> None:
    before = tree(base.path)
    chunks = list(encode_artifact(new, None if full else base, CHUNK))
    assert len(chunks) > 3
    if seed is not None:
        random.Random(seed).shuffle(chunks)
        chunks += chunks[: len(chunks) // 2]
    made = patched(new, None if full else base, chunks, tmp_path / "made")
    assert tree(made.path) == tree(new.path)
    assert made.specs == new.specs
    assert tree(base.path) == before


def test_a_delta_is_much_smaller_and_the_same_each_time(
    base: WeightsDirectory, new: WeightsDirectory
) -> None:
    full = list(encode_artifact(new, None, CHUNK))
    delta = list(encode_artifact(new, base, CHUNK))
    assert 4 * sum(map(len, delta)) < sum(map(len, full))
    assert list(encode_artifact(new, base, CHUNK)) == delta
    assert list(encode_artifact(base, new, CHUNK)) != delta
    assert list(encode_artifact(new, new, CHUNK)) == []


def test_nothing_changed_is_no_chunk(tmp_path: Path, base: WeightsDirectory) -> None:
    assert list(encode_artifact(base, base, CHUNK)) == []
    assert tree(patched(base, base, [], tmp_path / "made").path) == tree(base.path)


def test_tensors_that_stayed_are_in_the_same_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    large = {name: bf16(rng.standard_normal(20_000)) for name in "abc"}
    for version in (1, 2):
        contents = {name: ("BF16", bits) for name, bits in large.items()}
        if version == 2:
            contents["b"] = ("BF16", stepped(large["b"], rng))
        write_tensors(tmp_path / str(version) / "model.safetensors", contents)
    first, second = (
        {hashlib.sha256(chunk).digest() for chunk in encode_artifact(weights, None, CHUNK)}
        for weights in (open_weights(tmp_path / "1"), open_weights(tmp_path / "2"))
    )
    assert len(first) == len(second) == 3 * 10 + 1
    assert len(first & second) == 2 * 10 + 1


def test_entries_that_come_go_and_change_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    same, grows = bf16(rng.standard_normal(5000)), bf16(rng.standard_normal(3000))
    write_tensors(
        tmp_path / "base" / "model.safetensors",
        {"same": ("BF16", same), "grows": ("BF16", grows), "goes": ("U8", np.zeros(9, np.uint8))},
    )
    write_tensors(
        tmp_path / "new" / "model.safetensors",
        {
            "comes": ("F32", np.ones(4000, np.float32)),
            "grows": ("BF16", np.tile(grows, 2)),
            "same": ("BF16", same.reshape(50, 100)),
        },
        {"format": "pt"},
    )
    (tmp_path / "new" / "config.json").write_text("{}")
    base, new = open_weights(tmp_path / "base"), open_weights(tmp_path / "new")
    chunks = list(encode_artifact(new, base, CHUNK))
    assert tree(patched(new, base, chunks, tmp_path / "made").path) == tree(new.path)


def test_threads_may_apply_at_once(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory
) -> None:
    chunks = list(encode_artifact(new, base, CHUNK))
    patcher = Patcher(new.specs, base, tmp_path / "made")
    orders = [random.Random(seed).sample(chunks, len(chunks)) for seed in range(4)]
    threads = [
        threading.Thread(target=lambda order=order: [patcher.apply(chunk) for chunk in order])
        for order in orders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tree(patcher.finish().path) == tree(new.path)


# --- what must not go through ---


def test_a_delta_against_another_state_is_refused_before_anything_is_written(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory
) -> None:
    with pytest.raises(WeightsMismatch, match="the delta is against state"):
        Patcher(new.specs, new, tmp_path / "made", base_state=state_of(base.specs))
    with pytest.raises(WeightsMismatch, match="there is none"):
        Patcher(new.specs, None, tmp_path / "made", base_state=state_of(base.specs))
    assert not (tmp_path / "made").exists()


def test_a_base_that_was_touched_is_named_at_the_end(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory
) -> None:
    chunks = list(encode_artifact(new, base, CHUNK))
    spec = next(spec for spec in base.specs if spec.name == "layer.weight")
    file = base.path / spec.file
    content = bytearray(file.read_bytes())
    content[spec.offset_bytes + 777] ^= 1
    file.write_bytes(content)
    patcher = Patcher(new.specs, base, tmp_path / "made")
    for chunk in chunks:
        patcher.apply(chunk)
    with pytest.raises(WeightsMismatch, match=r"layer\.weight") as refused:
        patcher.finish()
    assert refused.value.entry == "layer.weight"


def test_a_chunk_that_is_missing_is_noticed(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory
) -> None:
    full = list(encode_artifact(new, None, CHUNK))
    with pytest.raises(WeightsMismatch, match="has not come whole"):
        patched(new, None, full[:2] + full[3:], tmp_path / "full")
    delta = list(encode_artifact(new, base, CHUNK))
    with pytest.raises(WeightsMismatch, match="came out with another hash") as refused:
        patched(new, base, delta[1:], tmp_path / "delta")
    assert refused.value.entry in {told.name for told in new.specs}


def test_entries_that_lie_about_content_are_named(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory
) -> None:
    lies = tuple(
        replace(spec, sha256=bytes(32)) if spec.name == "layer.half" else spec for spec in new.specs
    )
    chunks = list(encode_artifact(new, base, CHUNK))
    with pytest.raises(WeightsMismatch) as refused:
        patched(WeightsDirectory(new.path, lies), base, chunks, tmp_path / "made")
    assert refused.value.entry == "layer.half"


def test_a_header_that_tells_of_other_tensors_is_refused(tmp_path: Path) -> None:
    """The entries fit together and so do the hashes; only the header says something else."""
    write_tensors(tmp_path / "a" / "m.safetensors", {"x": ("U8", np.arange(8, dtype=np.uint8))})
    right = open_weights(tmp_path / "a")
    row = {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}
    header = header_of({"x": row})
    spec = right.specs[0]
    assert spec.size_bytes == len(header)
    file = tmp_path / "a" / "m.safetensors"
    file.write_bytes(header + bytes(range(8)))
    wrong = (replace(spec, sha256=hashlib.sha256(header).digest()), *right.specs[1:])
    lying = WeightsDirectory(tmp_path / "a", wrong)
    with pytest.raises(RemoteProtocolError, match="other tensors"):
        patched(lying, None, list(encode_artifact(lying, None, CHUNK)), tmp_path / "made")


def test_an_entry_that_the_base_has_is_not_patched(
    tmp_path: Path, base: WeightsDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it comes, all of it is there: nothing is decoded, and the files are the base's."""
    chunks = list(encode_artifact(base, None, CHUNK))
    monkeypatch.setattr(artifacts, "decode_block", None)
    assert tree(patched(base, base, chunks, tmp_path / "made").path) == tree(base.path)
    with pytest.raises(TypeError):
        patched(base, None, chunks, tmp_path / "other")


def test_a_failed_chunk_may_be_tried_again(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = list(encode_artifact(new, base, CHUNK))
    patcher = Patcher(new.specs, base, tmp_path / "made")

    def full(*args: object) -> None:
        raise StorageFailed("planted: the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(patcher._writer, "write", full)
        with pytest.raises(StorageFailed):
            patcher.apply(chunks[0])
    for chunk in chunks:
        patcher.apply(chunk)
    assert tree(patcher.finish().path) == tree(new.path)


def chunk_of(*blocks: tuple[int, int, int, int, bytes], magic: bytes = MAGIC) -> bytes:
    writer = PayloadWriter()
    writer.content += magic
    for index, start, count, method, payload in blocks:
        for number in (index, start, count, method, len(payload)):
            writer.varint(number)
        writer.content += payload
    return bytes(writer.content)


def indices(weights: WeightsDirectory) -> dict[str, int]:
    return {spec.name: index for index, spec in enumerate(weights.specs)}


def test_chunks_that_are_wrong_are_refused(tmp_path: Path, new: WeightsDirectory) -> None:
    at = indices(new)
    count, frozen = at["count"], at["frozen"]
    good = chunk_of((count, 0, 7, 0, bytes(56)))
    patcher = Patcher(new.specs, None, tmp_path / "made")
    patcher.apply(good)
    for wrong in (
        b"",
        MAGIC[:3],
        chunk_of((count, 0, 7, 0, bytes(56)), magic=b"SWC\x02"),
        good[:-1],
        good + b"\0",
        chunk_of((len(new.specs), 0, 1, 0, b"x")),
        chunk_of((count, 0, 8, 0, bytes(64))),
        chunk_of((count, 7, 1, 0, bytes(8))),
        chunk_of((count, 0, 0, 0, b"")),
        chunk_of((count, 1, 2, 0, bytes(16))),  # half of what was told already
        chunk_of((frozen, 0, 2, 0, bytes(4)), (frozen, 1, 2, 0, bytes(4))),
        chunk_of((frozen, 0, 2, 0, bytes(4)), (frozen, 0, 2, 0, bytes(4))),
        chunk_of((frozen, 0, 2, 4, bytes(4))),
        chunk_of((frozen, 0, 2, 2, bytes(4))),  # sparse, and there is no base
        chunk_of((at["empty"], 0, 1, 0, bytes(4))),
    ):
        with pytest.raises(RemoteProtocolError) as refused:
            patcher.apply(wrong)
        assert refused.value.reason is Reject.MALFORMED
    with pytest.raises(RemoteProtocolError) as refused:
        patcher.apply(MAGIC + bytes(CHUNK_BYTES_MAX))
    assert refused.value.reason is Reject.OVERSIZE


def test_many_small_blocks_are_bounded(
    tmp_path: Path, new: WeightsDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a chunk nor a version may be of so many blocks that remembering them is a burden."""
    at = indices(new)["layer.weight"]
    blocks = [(at, place, 1, 0, bytes(2)) for place in range(artifacts.BLOCKS_MAX + 1)]
    assert len(read_chunk(chunk_of(*blocks[:-1]), new.specs)) == artifacts.BLOCKS_MAX
    with pytest.raises(RemoteProtocolError, match="too many blocks"):
        read_chunk(chunk_of(*blocks), new.specs)
    monkeypatch.setattr(artifacts, "RANGES_MAX", 3)
    patcher = Patcher(new.specs, None, tmp_path / "made")
    patcher.apply(chunk_of(*blocks[:3]))
    with pytest.raises(RemoteProtocolError, match="too many blocks"):
        patcher.apply(chunk_of(*blocks[3:5]))


def test_many_small_tensors_go_in_several_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "BLOCKS_MAX", 10)
    for name, value in (("base", 1), ("new", 2)):
        tensors = {f"t{number:03}": ("U8", np.full(3, value, np.uint8)) for number in range(95)}
        write_tensors(tmp_path / name / "m.safetensors", tensors)
    base, new = open_weights(tmp_path / "base"), open_weights(tmp_path / "new")
    for old in (base, None):
        chunks = list(encode_artifact(new, old, CHUNK))
        assert len(chunks) >= 10
        made = patched(new, old, chunks, tmp_path / f"made{old is None}")
        assert tree(made.path) == tree(new.path)


def test_damaged_chunks_do_no_harm(
    tmp_path: Path, base: WeightsDirectory, new: WeightsDirectory
) -> None:
    """Whatever was flipped: refused, or noticed by hash at the end, but for bits that say nothing
    (padding); the base stays as it is."""
    before, rng = tree(base.path), random.Random(0)
    chunks = list(encode_artifact(new, base, CHUNK))
    refused = 0
    for attempt in range(60):
        chosen = rng.randrange(len(chunks))
        damaged = bytearray(chunks[chosen])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        rest = chunks[:chosen] + chunks[chosen + 1 :]
        try:
            made = patched(new, base, [bytes(damaged), *rest], tmp_path / str(attempt))
            assert tree(made.path) == tree(new.path)
        except (RemoteProtocolError, WeightsMismatch):
            refused += 1
    assert refused >= 50
    assert tree(base.path) == before


def test_chunks_are_of_about_the_size_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path / "base", 1, size=2_000_000)
    write_model(tmp_path / "new", 2, base=1, size=2_000_000)
    base, new = open_weights(tmp_path / "base"), open_weights(tmp_path / "new")
    for chunk_bytes in (CHUNK_TARGET_MIN, 32 << 10):
        for old in (base, None):
            sizes = [len(chunk) for chunk in encode_artifact(new, old, chunk_bytes)]
            assert max(sizes) <= 3 * chunk_bytes // 2 + 64
            assert sum(sizes) / len(sizes) > chunk_bytes / 3
    total = sum(map(len, encode_artifact(new, base, 64 << 10)))
    assert 0.7 < estimated_bytes(new, base) / total < 1.4
    assert estimated_bytes(new, None) == sum(spec.size_bytes for spec in new.specs)


def test_a_block_that_came_out_larger_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sample saw nothing of what changed, chunks stay within their bound all the same."""
    rng = np.random.default_rng(0)
    old = bf16(rng.standard_normal(300_000))
    changed = old.copy()
    changed[1500:9000] = rng.integers(0, 1 << 16, 7500)  # between two samples
    for name, bits in (("base", old), ("new", changed)):
        write_tensors(tmp_path / name / "m.safetensors", {"w": ("BF16", bits)})
    base, new = open_weights(tmp_path / "base"), open_weights(tmp_path / "new")
    chunks = list(encode_artifact(new, base, CHUNK))
    assert max(map(len, chunks)) <= 3 * CHUNK // 2 + 64
    assert tree(patched(new, base, chunks, tmp_path / "made").path) == tree(new.path)
    blocks = [told for chunk in chunks for told in read_chunk(chunk, new.specs)]
    assert len(blocks) > 1


def test_sizes_of_chunks_have_bounds(base: WeightsDirectory) -> None:
    for chunk_bytes in (0, CHUNK_TARGET_MIN - 1, CHUNK_TARGET_MAX + 1):
        with pytest.raises(ValueError, match="bytes"):
            encode_artifact(base, None, chunk_bytes)
    suggested = [suggested_chunk_bytes(mega << 20) for mega in (0, 20, 200, 2000, 16_000, 10**6)]
    assert suggested == [64 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20]
    assert all(CHUNK_TARGET_MIN <= size <= CHUNK_TARGET_MAX for size in suggested)


@pytest.mark.slow
def test_memory_is_that_of_blocks_and_not_of_the_model(tmp_path: Path) -> None:
    """Counted over checking the base, encoding, applying and verifying."""
    write_model(tmp_path / "base", 1, size=16_000_000)
    write_model(tmp_path / "new", 2, base=1, size=16_000_000)
    base, new = open_weights(tmp_path / "base"), open_weights(tmp_path / "new")
    model_bytes = sum(spec.size_bytes for spec in new.specs)
    tracemalloc.start()
    patcher = Patcher(new.specs, base, tmp_path / "made")
    for chunk in encode_artifact(new, base, 64 << 10):
        patcher.apply(chunk)
    patcher.finish()
    peak = tracemalloc.get_traced_memory()[1]
    held = new.path.joinpath("model-1.safetensors").read_bytes()  # would show, if it were counted
    with_model = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.95 * model_bytes
    assert with_model >= len(held) > 0.7 * model_bytes
