"""A policy's weights in a node's data directory, and `swarm-node weights ls` and `verify`.

Both commands work without a node, on any directory of safetensors files. The data directory:

    weights/policies/NAME/   the versions of one policy (`swarm.weights.version_store`)
    weights/store/           chunks (`swarm.weights.chunk_store`)
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Final, Protocol

from node.config import NodeConfig
from node.observe.text_format import amount, printable, short_id
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import PeerId
from swarm.peers.connection_gater import ConnectionGater
from swarm.storage import RunSync, Runtime
from swarm.texts import listed
from swarm.transport.base import Transport
from swarm.weights import manifest as manifest_wire
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.hot_swap import HeadRules
from swarm.weights.manifest import FILE_DTYPE, HEADER_DTYPE, TensorSpec, open_weights, state_of
from swarm.weights.publisher import VERSIONS_KEPT
from swarm.weights.version_store import (
    MANIFEST_SUFFIX,
    LocalVersion,
    Versions,
    read_current,
    read_versions,
)
from swarm.weights.weights_service import Follower, WeightsRules, WeightsService
from swarm.wire.messages import MANIFEST_BYTES_MAX

POLICIES = Path("weights", "policies")
STORE = Path("weights", "store")
DIFFERENCES_SHOWN_MAX = 20
NAME_CHARS_SHOWN_MAX = 100
STATE_CHARS_SHOWN = 12


# --- ls ----------------------------------------------------------------------------------------


def list_weights(data_dir: Path) -> Iterator[str]:
    """A line for each version in a data directory and one for the place of the newest, which
    `verify` takes; then one for the chunks. Reads only."""
    policies = data_dir / POLICIES
    if not policies.is_dir():
        raise ConfigError(f"{data_dir}: no weights in there; name a node's data directory")
    found = False
    for policy in sorted(path for path in policies.iterdir() if path.is_dir()):
        current = read_current(policy)
        newest = None
        for newest in read_versions(policy):
            found = True
            yield _line(policy.name, newest, newest.version == current)
        if newest is not None:
            yield f"  {newest.version} is in {newest.directory}"
    if not found:
        yield "no complete version"
    chunks = [path.stat().st_size for path in (data_dir / STORE).glob("chunks/*/*")]
    yield f"{len(chunks)} chunks, {amount(sum(chunks), 'B')}"


def _line(policy: str, local: LocalVersion, is_current: bool) -> str:
    created = datetime.fromtimestamp(local.created_at_s, UTC)
    return (
        f"{printable(policy, NAME_CHARS_SHOWN_MAX)} {local.version}{'*' if is_current else ' '} "
        f"{amount(local.size_bytes, 'B'):>8} {local.entries:>6} entries  "
        f"{local.state.hex()[:STATE_CHARS_SHOWN]}  {created:%Y-%m-%d %H:%M:%S} UTC "
        f"by {short_id(local.publisher)}"
    )


# --- verify ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of a comparison bit for bit, with its report."""

    is_same: bool
    lines: tuple[str, ...]


def verify(directory: Path, manifest: Path | None, against: Path | None) -> VerifyResult:
    """Hash the weights in a directory and compare them with another directory, `against`, or with a
    published manifest; None: the one beside a node's version."""
    if against is not None:
        wanted = open_weights(against).specs
    else:
        path = directory.resolve()
        wanted = _read_manifest(manifest or path.with_name(path.name + MANIFEST_SUFFIX))
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory")
    try:
        opened = open_weights(directory)
    except ConfigError as error:  # a file that is cut short or missing, for one
        return VerifyResult(False, (str(error), "not the same"))
    found = opened.specs
    lines = list(differences(found, wanted))
    if not lines:
        size_bytes = sum(spec.size_bytes for spec in found)
        state = state_of(found).hex()[:STATE_CHARS_SHOWN]
        lines = [f"the same: {len(found)} entries, {amount(size_bytes, 'B')}, state {state}"]
        if opened.left_out:
            names = [printable(name, NAME_CHARS_SHOWN_MAX) for name in opened.left_out]
            told = listed(names, DIFFERENCES_SHOWN_MAX)
            lines.append(f"not looked at, no part of weights: {told}")
        return VerifyResult(True, tuple(lines))
    shown = lines[:DIFFERENCES_SHOWN_MAX]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    entries = len({spec.name for spec in (*found, *wanted)})
    return VerifyResult(False, (*shown, f"not the same: {len(lines)} of {entries} entries differ"))


def differences(found: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> Iterator[str]:
    """A line for each entry that differs, by name. Pure."""
    here, there = ({spec.name: spec for spec in specs} for specs in (found, wanted))
    for name in sorted(here.keys() | there.keys()):
        shown = printable(name, NAME_CHARS_SHOWN_MAX)
        if name not in here:
            yield f"{shown}: missing"
        elif name not in there:
            yield f"{shown}: should not be there"
        elif here[name] != there[name]:
            yield f"{shown}: {_difference(here[name], there[name])}"


def _difference(found: TensorSpec, wanted: TensorSpec) -> str:
    if found.file != wanted.file or found.offset_bytes != wanted.offset_bytes:
        here = f"{found.file} at byte {found.offset_bytes}"
        return f"in {here}, should be in {wanted.file} at byte {wanted.offset_bytes}"
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return f"{_kind(found)}, should be {_kind(wanted)}"
    return "other content"


def _kind(spec: TensorSpec) -> str:
    if spec.dtype in (FILE_DTYPE, HEADER_DTYPE):
        return f"{spec.dtype} of {spec.size_bytes} bytes"
    return f"{spec.dtype} {list(spec.shape)}"


def _read_manifest(path: Path) -> tuple[TensorSpec, ...]:
    try:
        with path.open("rb") as file:
            body = file.read(MANIFEST_BYTES_MAX + 1)
        return manifest_wire.decode_manifest(body).tensors
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a manifest with --manifest, or weights with --against"
        ) from None
    except RemoteProtocolError as error:
        raise ConfigError(f"{path}: no manifest: {error.detail}") from None


# The weights of a run's policy in a node's data directory: what learner and workers share.

POLICY: Final = "policy"
STORE_BYTES_MAX: Final = 64 << 30
FETCHED_KEPT: Final = 2  # versions that stay on a worker's disk
PATCH_THREADS_MAX: Final = 4


class Clock(Protocol):
    """Time, chance, and a place for blocking calls."""

    @property
    def run_sync(self) -> RunSync:
        """The place for calls that block."""

    def now_s(self) -> float:
        """Unix time."""

    def rng(self, purpose: str) -> Random:
        """Random numbers for one purpose, new at each start."""


def weights_rules(
    run_id: str, publishers: Iterable[PeerId], clock_skew_s: float, policy: str, *, publishes: bool
) -> WeightsRules:
    """The rules of this machine for a policy, as its publisher or as a follower of versions."""
    return WeightsRules(
        heads=HeadRules(run_id, frozenset(publishers), clock_skew_s),
        policy=policy,
        follows=not publishes,
        shared_versions=VERSIONS_KEPT if publishes else FETCHED_KEPT,
        patch_threads=min(PATCH_THREADS_MAX, os.cpu_count() or 1),
    )


@contextmanager
def open_weights_service(
    data_dir: Path,
    rules: WeightsRules,
    transport: Transport,
    gater: ConnectionGater,
    clock: Clock,
    follower: Follower,
    store_bytes: int = STORE_BYTES_MAX,
) -> Iterator[WeightsService]:
    """The service of a policy in a data directory, not running yet; its store is open within."""
    directory = data_dir / POLICIES / rules.policy
    with ChunkStore(data_dir / STORE, store_bytes) as store:
        yield WeightsService(
            rules,
            transport,
            gater,
            Versions(directory, rules.shared_versions),
            store,
            Runtime(clock.now_s, clock.rng("weights"), clock.run_sync),
            follower,
        )


@contextmanager
def policy_weights(
    config: NodeConfig,
    transport: Transport,
    gater: ConnectionGater,
    clock: Clock,
    follower: Follower | None = None,
) -> Iterator[WeightsService]:
    """The service of a run's policy, for a follower of its versions; None: this node publishes."""
    rules = weights_rules(
        config.run.run_id,
        map(PeerId, config.run.weights_publishers),
        float(config.run.limits.clock_skew_s),
        POLICY,
        publishes=follower is None,
    )
    with open_weights_service(
        config.data_dir, rules, transport, gater, clock, follower or Follower()
    ) as service:
        yield service
