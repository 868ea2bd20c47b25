"""The committed corpus under the same oracles as a fuzz run, and a planted fault for each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from swarm import codec, messages
from swarm.errors import RemoteProtocolError
from tests.fuzz import fuzz_codec
from tests.fuzz.harness import CPU_S_MAX, GROWTH_BYTES_MAX, Finding, Watch, keep_finding

CORPUS = Path(__file__).parent / "corpus"
CORPUS_BYTES_MAX = 500_000


def corpus(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def replay(check: Callable[[bytes], None], target: str) -> Watch:
    watch = Watch(check)
    for data in corpus(target):
        watch.judge(data)
    return watch


def test_codec_corpus() -> None:
    assert replay(fuzz_codec.check, "codec").figures.executions >= len(fuzz_codec.seeds())


def test_every_seed_is_in_the_corpus() -> None:
    assert set(fuzz_codec.seeds().values()) <= set(corpus("codec"))


def test_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(sizes) < CORPUS_BYTES_MAX


def test_mutations_are_inputs_too() -> None:
    """A round of the mutator over the seeds: most still parse, and no oracle breaks."""
    random, changed = Random(7), 0
    for _ in range(10):
        for seed in fuzz_codec.seeds().values():
            data = fuzz_codec.mutate(seed, random)
            if data is not None:
                fuzz_codec.check(data)
                changed += data != seed
    assert changed > 50


# --- planted faults ----------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def _field_twice(patch: Patch) -> None:
    patch.setattr(codec._Limits, "map", lambda self, pairs: dict(pairs))


def _another_error(patch: Patch) -> None:
    def schema_fault(kind: Any, error: Exception) -> Exception:
        raise KeyError(kind)

    patch.setattr(codec, "_schema_fault", schema_fault)


def _long_detail(patch: Patch) -> None:
    patch.setattr(codec, "_bounded", lambda text: text + "x" * 500)


def _coerced(patch: Patch) -> None:
    """What strict validation refuses, lax validation takes."""

    def lax(data: bytes, kind: Any, bytes_max: int) -> Any:
        try:
            return kind.model_validate(codec._unpack(data), strict=False)
        except ValueError:
            raise RemoteProtocolError(codec.Reject.MALFORMED, "no") from None

    patch.setattr(codec, "decode", lax)


def _unsigned(patch: Patch) -> None:
    patch.setattr(codec, "verify", lambda *arguments: None)


def _any_producer(patch: Patch) -> None:
    patch.setattr(codec, "_check_producer", lambda *arguments: None)


def _any_logprob(patch: Patch) -> None:
    patch.setattr(codec, "_are_logprobs", lambda values: True)


def _lossy(patch: Patch) -> None:
    encode = codec.encode
    patch.setattr(codec, "encode", lambda message: encode(message)[:-1] + b"\x00")


FAULTS = {  # and what the finding says
    "field twice": (_field_twice, "reference says"),
    "another error": (_another_error, "KeyError"),
    "long detail": (_long_detail, "DETAIL_CHARS_MAX"),
    "coerced": (_coerced, "reference says"),
    "unsigned": (_unsigned, "and accepted"),
    "any producer": (_any_producer, "reference says"),
    "any log-prob": (_any_logprob, "reference says"),
    "lossy": (_lossy, "changed on the way"),
}


@contextmanager
def planted(fault: Callable[[Patch], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        yield


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_codec_is_found(fault: Callable[[Patch], None], message: str) -> None:
    with planted(fault), pytest.raises(Finding, match=message):
        replay(fuzz_codec.check, "codec")


def test_a_removed_limit_of_a_field_is_found() -> None:
    """The rules come from the annotations, so the other tests hold those; here the codec forgets
    one, as a codec that checks the fields by itself could."""

    def decode(data: bytes, kind: Any, bytes_max: int) -> Any:
        tree = codec._unpack(data)
        if kind is messages.Want and isinstance(tree, dict) and tree.keys() == names:
            return kind.model_construct(**tree)
        return original(data, kind, bytes_max)

    original, names = codec.decode, messages.Want.model_fields.keys()
    with planted(lambda patch: patch.setattr(codec, "decode", decode)), pytest.raises(Finding):
        replay(fuzz_codec.check, "codec")


# --- the harness itself ------------------------------------------------------------------------


def test_a_slow_input_is_found() -> None:
    def burn(data: bytes) -> None:
        end_s = time.process_time() + (1.5 * CPU_S_MAX if data == b"slow" else 0)
        while time.process_time() < end_s:
            pass

    watch = Watch(burn)
    watch.judge(b"quick")
    with pytest.raises(Finding, match="ms of CPU"):
        watch.judge(b"slow")


def test_a_slow_moment_is_no_finding() -> None:
    """A pass of the garbage collector hits any input; the input is judged by its best run."""
    moments = iter([1.5 * CPU_S_MAX, 0.0, 0.0, 0.0])

    def burn(data: bytes) -> None:
        end_s = time.process_time() + next(moments)
        while time.process_time() < end_s:
            pass

    watch = Watch(burn)
    watch.judge(b"")
    assert watch.figures.slowest_s < CPU_S_MAX


def test_growing_memory_is_found() -> None:
    sizes = iter([10**8, 10**8, 10**8 + GROWTH_BYTES_MAX, 10**8 + GROWTH_BYTES_MAX + 1])
    watch = Watch(lambda data: None, memory=lambda: next(sizes), warm_up_runs=2)
    for _ in range(3):
        watch.judge(b"")
    with pytest.raises(Finding, match="memory has grown"):
        watch.judge(b"")


def test_peak_memory_is_what_was_held() -> None:
    before = Watch(lambda data: None)
    before.judge(b"")
    ballast = bytearray(b"x") * 2**28
    after = Watch(lambda data: None)
    after.judge(b"")
    assert after.figures.peak_bytes >= len(ballast)


def test_a_finding_is_kept_with_its_reason(tmp_path: Path) -> None:
    path = keep_finding(tmp_path / "findings", b"input", Finding("why"))
    assert path.read_bytes() == b"input"
    assert path.with_suffix(".txt").read_text() == "why"
