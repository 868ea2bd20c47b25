"""The committed corpus under the same oracles as a fuzz run, and a planted fault for each."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from libp2p.exceptions import BaseLibp2pError
from libp2p.transport.upgrader import TransportUpgrader

from node.envs import answers, numerals
from swarm.errors import RemoteProtocolError
from swarm.exchange.exchange_service import Exchange
from swarm.identity import PeerId
from swarm.peers.discovery import Discovery
from swarm.transport import request_slots
from swarm.transport.libp2p import admission, host, noise, streams, yamux
from swarm.weights import manifest as manifest_wire
from swarm.wire import codec, messages
from tests.fuzz import fuzz_answers, fuzz_codec, fuzz_connections, fuzz_streams
from tests.fuzz.harness import CPU_S_MAX, GROWTH_BYTES_MAX, Finding, Watch, keep_finding
from tests.fuzz.rig import PIECES_MAX, pieces

CORPUS = Path(__file__).parent / "corpus"
CORPUS_BYTES_MAX = 500_000


def corpus(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def replay(check: Callable[[bytes], None], target: str) -> Watch:
    watch = Watch(check)
    for data in corpus(target):
        watch.judge(data)
    return watch


TARGETS: dict[str, Any] = {
    "codec": fuzz_codec,
    "streams": fuzz_streams,
    "connections": fuzz_connections,
    "answers": fuzz_answers,
}


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target: str) -> None:
    module = TARGETS[target]
    assert replay(module.check, target).figures.executions >= len(module.seeds())


@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_is_in_the_corpus(target: str) -> None:
    assert set(TARGETS[target].seeds().values()) <= set(corpus(target))


def test_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(sizes) < CORPUS_BYTES_MAX


@pytest.mark.parametrize("target", TARGETS)
def test_mutations_are_inputs_too(target: str) -> None:
    """A few rounds of the mutator over the seeds: many change, and no oracle breaks."""
    random, changed = Random(7), 0
    module = TARGETS[target]
    for _ in range(5):
        for seed in module.seeds().values():
            data = module.mutate(seed, random)
            if data is not None:
                module.check(data)
                changed += data != seed
    assert changed > 15


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


def _any_manifest(patch: Patch) -> None:
    patch.setattr(manifest_wire, "manifest_fault", lambda manifest: None)


def _any_entries(patch: Patch) -> None:
    patch.setattr(manifest_wire, "check_entries", lambda entries: None)


FAULTS = {  # and what the finding says
    "field twice": (_field_twice, "reference says"),
    "another error": (_another_error, "KeyError"),
    "long detail": (_long_detail, "DETAIL_CHARS_MAX"),
    "coerced": (_coerced, "reference says"),
    "unsigned": (_unsigned, "and accepted"),
    "any producer": (_any_producer, "reference says"),
    "any log-prob": (_any_logprob, "reference says"),
    "lossy": (_lossy, "changed on the way"),
    "any manifest": (_any_manifest, "reference says"),
    "any entries": (_any_entries, "reference says"),
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


def _handler_fails(patch: Patch) -> None:
    async def fail(self: Any, peer: Any, payload: bytes) -> bytes:
        raise KeyError(payload)

    patch.setattr(Exchange, "_serve_groups", fail)


def _validator_fails(patch: Patch) -> None:
    def fail(self: Any, peer: Any, payload: bytes, **_: Any) -> bool:
        raise IndexError(payload)

    patch.setattr(Exchange, "_hear_gossip", fail)


def _slot_kept(patch: Patch) -> None:
    @contextmanager
    def counted(self: request_slots.Served, peer: PeerId) -> Iterator[bool]:
        self.requests_by_peer[peer] += 1
        yield True

    patch.setattr(request_slots.Served, "counted", counted)


def _no_patience(patch: Patch) -> None:
    patch.setattr(host, "NEGOTIATION_TIMEOUT_S", float("inf"))


def _steering_text(patch: Patch) -> None:
    patch.setattr(streams, "ascii", lambda text: text, raising=False)


def _unbounded_answer(patch: Patch) -> None:
    async def answer(self: Any, response: bytes) -> None:
        await self.stream.write(bytes(fuzz_streams.WRITTEN_BYTES_MAX + 1))

    patch.setattr(streams.InboundStream, "answer", answer)


def _hello_fails(patch: Patch) -> None:
    def fail(self: Any, *arguments: Any) -> None:
        raise TypeError(arguments)

    patch.setattr(Discovery, "_learn_hearsay", fail)


STREAM_FAULTS = {
    "a handler fails": (_handler_fails, "KeyError"),
    "the validator fails": (_validator_fails, "IndexError"),
    "a slot is kept": (_slot_kept, "not given back"),
    "no end to silence": (_no_patience, "no end"),
    "text that steers": (_steering_text, "steer a terminal"),
    "an answer without end": (_unbounded_answer, "bytes written"),
    "a reply is not survived": (_hello_fails, "TypeError"),
}


@pytest.mark.parametrize(("fault", "message"), STREAM_FAULTS.values(), ids=STREAM_FAULTS)
def test_a_fault_in_the_handlers_is_found(fault: Callable[[Patch], None], message: str) -> None:
    with planted(fault), pytest.raises(Finding, match=message):
        replay(fuzz_streams.check, "streams")


def _handshake_raises(patch: Patch) -> None:
    patch.setattr(admission.HardUpgrader, "upgrade_security", _upstream_security)


async def _upstream_security(self: Any, *arguments: Any) -> Any:
    return await TransportUpgrader.upgrade_security(self, *arguments)


def _signature_unchecked(patch: Patch) -> None:
    patch.setattr(noise, "verify_handshake_payload_sig", lambda *arguments: True)


def _no_windows(patch: Patch) -> None:
    """As upstream: what goes beyond the window is stored."""
    take_header = yamux.MuxedConnection._process_header

    def take(self: Any, version: int, kind: int, flags: int, stream_id: int, length: int) -> Any:
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.recv_window = max(stream.recv_window, length)
        return take_header(self, version, kind, flags, stream_id, length)

    patch.setattr(yamux.MuxedConnection, "_process_header", take)


def _frame_error_escapes(patch: Patch) -> None:
    patch.setattr(yamux, "FrameError", KeyError)
    patch.setattr(yamux.MuxedConnection, "handle_incoming", _reading_without_a_boundary)


async def _reading_without_a_boundary(self: Any) -> None:
    try:
        while self.alive:
            for piece in (await self._receive())[0]:
                await self._process_piece(piece)
    except BaseLibp2pError:
        pass
    finally:
        await self._cleanup_on_error()


CONNECTION_FAULTS = {
    "a handshake raises": (_handshake_raises, "UnicodeDecodeError|ConnectionClosedError"),
    "nobody's signature": (_signature_unchecked, "without a signature"),
    "no windows": (_no_windows, "window has room"),
    "a frame ends more than its connection": (_frame_error_escapes, "KeyError"),
}


@pytest.mark.parametrize(("fault", "message"), CONNECTION_FAULTS.values(), ids=CONNECTION_FAULTS)
def test_a_fault_in_connections_is_found(fault: Callable[[Patch], None], message: str) -> None:
    with planted(fault), pytest.raises(Finding, match=message):
        replay(fuzz_connections.check, "connections")


def _finder(patch: Patch, kind: str, find: Callable[[str], str | None]) -> None:
    patch.setattr(answers, "_FINDERS", {**answers._FINDERS, kind: find})


def _blanks_may_follow(patch: Patch) -> None:
    _finder(patch, "last_number", lambda text: answers._last_number(text.rstrip()))


def _any_row_of_digits(patch: Patch) -> None:
    _finder(patch, "last_number", lambda text: (re.findall("[0-9]+", text) or [None])[-1])


def _no_sign(patch: Patch) -> None:
    patch.setattr(numerals, "_signed", lambda sign, text: text)


def _padded_inside(patch: Patch) -> None:
    patch.setattr(answers, "_unpadded", lambda text: text or None)


def _first_tag(patch: Patch) -> None:
    _finder(patch, "tags", lambda text: text.partition("<answer>")[2].partition("</answer>")[0])


def _raises(patch: Patch) -> None:
    _finder(patch, "boxed", lambda text: text[text.index("\\boxed{") :])


ANSWER_FAULTS = {
    "blanks may follow": (_blanks_may_follow, "reference says None|followed by"),
    "any row of digits": (_any_row_of_digits, "reference says|reasoning changes|followed by"),
    "no sign": (_no_sign, "reference says '-"),
    "padded inside": (_padded_inside, "reference says None|followed by"),
    "the first tag": (_first_tag, "reference says"),
    "raises": (_raises, "ValueError"),
}


@pytest.mark.parametrize(("fault", "message"), ANSWER_FAULTS.values(), ids=ANSWER_FAULTS)
def test_a_fault_in_answers_is_found(fault: Callable[[Patch], None], message: str) -> None:
    with planted(fault), pytest.raises(Finding, match=message):
        replay(fuzz_answers.check, "answers")


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


@pytest.mark.parametrize("cut", range(6))
def test_pieces_are_few_and_make_up_the_whole(cut: int) -> None:
    """Each costs a read: a megabyte in pieces of a hundred bytes took all the time of an input."""
    data = bytes(2**20)
    cut_up = list(pieces(data, cut))
    assert b"".join(cut_up) == data
    assert all(cut_up)
    assert len(cut_up) <= PIECES_MAX + 1
    assert list(pieces(b"", cut)) == []


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
