"""One policy's weights on one node: hear of versions, fetch them, load them, serve them.

A head announces a version. Its manifest is fetched by root, the cheapest route to it is chosen, and
one broadcast for each step brings the missing chunks. The version is patched, verified and loaded
while the one before serves. A newer version ends an older one on its way; fetched chunks stay in
the store.

Nothing that a peer sends, and no full disk, ends the service: each try ends in a `VersionOutcome`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from swarm.errors import (
    Reject,
    RemoteProtocolError,
    RequestRefused,
    StorageFailed,
    TransportError,
    WeightsMismatch,
)
from swarm.identity import PeerId
from swarm.limits.backoff import Backoff
from swarm.limits.bounded_table import BoundedTable
from swarm.limits.quotas import Kind
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.requests import PeersToAsk, ask
from swarm.storage import Runtime
from swarm.transport.base import ServeLimits, Transport
from swarm.weights import manifest as manifest_wire
from swarm.weights import version_store as snapshots
from swarm.weights.broadcast import OfferedArtifact, Sharing
from swarm.weights.broadcast_time import bound_s
from swarm.weights.chunk_server import BYTES_PER_S_MIN, ArtifactKey, ChunkService
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.hot_swap import (
    Applied,
    HeadRules,
    HeadTable,
    Made,
    VersionLoader,
    apply_version,
    load_heads,
    save_head,
)
from swarm.weights.manifest import Manifest
from swarm.weights.version_store import (
    LocalVersion,
    Step,
    Versions,
    cheapest_route,
    full_bytes,
)
from swarm.wire import codec
from swarm.wire.messages import (
    HEADS_PROTOCOL,
    HEADS_REPLY_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_PROTOCOL,
    WANT_HEADS_BYTES_MAX,
    WANT_MANIFEST_BYTES_MAX,
    HeadBody,
    HeadsReply,
    WantHeads,
    WantManifest,
    weights_topic,
)

HEADS_LOOK_S: Final = 1.0  # between two looks for new peers
HEADS_AGAIN_S: Final = 10.0  # between two requests to a random peer
HEADS_ASKED_MAX: Final = 16  # new peers at one look
HEADS_TIMEOUT_S: Final = 20.0
MANIFEST_ANSWER_S: Final = 20.0  # beyond the time of its size on the slowest link
MANIFEST_NEXT_S: Final = 2.0  # without an answer, before the next peer is asked too
MANIFEST_ASKED_MAX: Final = 8  # peers at once; then the request asked first is cancelled
MANIFEST_AGAIN_S: Final = 1.0  # after no peer had it
MANIFESTS_CACHED_MAX: Final = 4
OLDER_MANIFESTS_MAX: Final = 8  # fetched for a route of several steps
ROUTES_MAX: Final = 4  # tried for one version; each but the last puts a base in doubt
RETRY: Final = Backoff(15.0, 600.0)  # seconds, after a version could not be made


@dataclass(frozen=True, slots=True)
class WeightsRules:
    """This node's part in one policy of a run."""

    heads: HeadRules
    policy: str
    follows: bool = True  # gets each newer version; else only serves what is here
    shared_versions: int = 2  # whose chunks it gives on
    patch_threads: int = 1


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """The result of one try to get a version."""

    applied: Applied
    bases: tuple[int | None, ...] = ()  # of each step; None: the full snapshot
    bound_s: float | None = None  # least time of the broadcasts by reported rates; None: unknown
    reused_bytes: int = 0  # of chunks that were here already
    doubts: tuple[str, ...] = ()  # faults of versions here that it was not built on


@dataclass(frozen=True, slots=True)
class VersionProgress:
    """The progress of the version on its way."""

    version: int
    phase: str  # manifest, fetch, patch, load; dropped: a newer version came
    fetched_bytes: int = 0
    total_bytes: int = 0


class NoEngine:
    """For nodes on which a version is files and nothing else."""

    async def load(self, directory: Path) -> None:
        await trio.lowlevel.checkpoint()


@dataclass(frozen=True, slots=True)
class Follower:
    """A node's use of versions. `tell` and `watch` must be quick; the latter hears no bytes."""

    engine: VersionLoader = field(default_factory=NoEngine)
    tell: Callable[[VersionOutcome], None] = lambda outcome: None
    watch: Callable[[VersionProgress], None] = lambda stage: None


@dataclass(slots=True)
class _Try:
    """The state of the version on its way, for `VersionOutcome` and `VersionProgress`."""

    version: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    phase: str = "manifest"
    bases: list[int | None] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    bound_s: float = 0.0
    is_bound_known: bool = True
    reused_bytes: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    patch_s: float = 0.0


# Long: tries, heads and manifests of one version go together.
class WeightsService:
    """One policy of one run, on one transport."""

    def __init__(
        self,
        rules: WeightsRules,
        transport: Transport,
        gater: ConnectionGater,
        versions: Versions,
        store: ChunkStore,
        runtime: Runtime,
        follower: Follower | None = None,
    ) -> None:
        """Heads are kept beside the versions. `runtime.run_sync` hashes, patches and writes."""
        self.rules = rules
        self.heads = HeadTable(rules.heads, runtime.now_s)
        self.versions = versions
        self.gater = gater
        self.now_s = runtime.now_s
        self.run_sync = runtime.run_sync
        chunks = ChunkService(transport, gater=gater)
        self.sharing = Sharing(chunks, store, gater.ledger, runtime)
        self._transport = transport
        self._directory = versions.directory / "heads"
        self._store = store
        self._rng = runtime.rng
        self._follower = follower or Follower()
        self._news = trio.Event()
        self._told_by: BoundedTable[bytes, PeerId] = BoundedTable(MANIFESTS_CACHED_MAX)  # of roots
        self._bodies: BoundedTable[bytes, bytes] = BoundedTable(MANIFESTS_CACHED_MAX)  # by root
        self._try: _Try | None = None
        self.heard = trio.Event()  # set once any peer has answered with its heads
        self.refused: str | None = None  # why the last head was not believed
        self.ahead: str | None = None  # how far, where a publisher's clock is ahead of this one

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, listen and follow until cancelled."""
        self._transport.serve(
            HEADS_PROTOCOL,
            self._serve_heads,
            ServeLimits(WANT_HEADS_BYTES_MAX, HEADS_REPLY_BYTES_MAX, concurrent_max=16),
        )
        self._transport.serve(
            MANIFEST_PROTOCOL,
            self._serve_manifest,
            ServeLimits(
                WANT_MANIFEST_BYTES_MAX,
                MANIFEST_BYTES_MAX,
                concurrent_max=16,
                timeout_s=MANIFEST_ANSWER_S + MANIFEST_BYTES_MAX / BYTES_PER_S_MIN,
            ),
        )
        for record in await self.run_sync(load_heads, self._directory):
            try:
                self.heads.hear(record)
            except RemoteProtocolError as error:  # the run's rules have changed
                self.refused = error.detail
        topic = weights_topic(self.rules.heads.run_id)
        heard = await self._transport.subscribe(topic, self._judge_gossip, self._admits)
        heard.close()  # the validator takes each head in
        async with trio.open_nursery() as nursery:
            self.sharing.nursery = nursery
            await self.share_held()
            nursery.start_soon(self._ask_for_heads)
            if self.rules.follows:
                nursery.start_soon(self._follow)
            task_status.started()

    def progress(self) -> VersionProgress | None:
        current = self._try
        if current is None:
            return None
        have, total = self.sharing.progress_of(current.version)
        return VersionProgress(current.version, current.phase, have, total)

    def _admits(self, peer: PeerId) -> bool:
        return not self.gater.is_banned(peer) and self.gater.allows(Kind.HEAD, peer)

    def _judge_gossip(self, peer: PeerId, payload: bytes) -> bool:
        try:
            return self._hear(peer, payload)
        except RemoteProtocolError:
            return False

    def _hear(self, peer: PeerId, record: bytes) -> bool:
        """Take in a head. True if it is new, and so is passed on."""
        try:
            head, is_newer = self.gater.ledger.judge(peer, self.heads.hear, record)
        except RemoteProtocolError as error:
            self.refused = error.detail
            if error.reason is Reject.FUTURE:
                self.ahead = error.detail
                self.refused += "; is the clock right, here and at the publisher's?"
            raise
        if not is_newer:
            return False
        self.ahead = None
        self._told_by.put(head.root, peer)
        if head.policy == self.rules.policy:
            if self._try is not None and self._try.version < head.version:
                self._try.scope.cancel()
            self._news.set()
        return True

    async def announce(self, record: bytes) -> HeadBody:
        """Publish a head of our own."""
        head, _ = self.heads.hear(record)
        await self.run_sync(self._save_head, head.version)
        await self._transport.publish(weights_topic(self.rules.heads.run_id), record)
        return head

    def _save_head(self, version: int) -> None:
        record = self.heads.record(self.rules.policy, version)
        if record is not None:
            held = [local.version for local in self.versions.held()]
            save_head(self._directory, version, record, held)

    async def _serve_heads(self, peer: PeerId, payload: bytes) -> bytes:
        asked = self.gater.read(Kind.HEADS, peer, payload, WantHeads, WANT_HEADS_BYTES_MAX)
        self.gater.check_run(peer, asked.run_id, self.rules.heads.run_id)
        records = self.heads.records(self.rules.policy, self.sharing.versions())
        return codec.encode(HeadsReply(type="heads", records=records))

    async def _ask_for_heads(self) -> None:
        """Ask each new peer, and now and then any."""
        to_ask = PeersToAsk(HEADS_AGAIN_S, HEADS_ASKED_MAX, self._rng, trio.current_time())
        async with trio.open_nursery() as nursery:
            while True:
                for peer in to_ask.draw(self._transport.peers(), trio.current_time()):
                    nursery.start_soon(self._ask_heads, peer)
                await trio.sleep(HEADS_LOOK_S)

    async def _ask_heads(self, peer: PeerId) -> None:
        want = WantHeads(type="want_heads", run_id=self.rules.heads.run_id)
        try:
            reply = await ask(
                self._transport,
                peer,
                HEADS_PROTOCOL,
                want,
                HeadsReply,
                HEADS_REPLY_BYTES_MAX,
                HEADS_TIMEOUT_S,
                self.gater.ledger,
            )
        except (RemoteProtocolError, TransportError):
            return
        for record in reply.records:
            try:
                self._hear(peer, record)
            except RemoteProtocolError:
                break
        self.heard.set()

    async def _serve_manifest(self, peer: PeerId, payload: bytes) -> bytes:
        asked = self.gater.read(Kind.MANIFEST, peer, payload, WantManifest, WANT_MANIFEST_BYTES_MAX)
        self.gater.check_run(peer, asked.run_id, self.rules.heads.run_id)
        body = await self._body_here(asked.root)
        if body is None:
            raise RequestRefused("that manifest is not here")
        return body

    async def _body_here(self, root: bytes) -> bytes | None:
        body = self._bodies.get(root)
        if body is not None:
            return body
        version = self.sharing.version_of(root)
        if version is None or self.versions.get(version) is None:
            return None
        try:
            found: bytes = await self.run_sync(self.versions.manifest_body, version)
        except StorageFailed:  # it was just removed
            return None
        return found

    async def _manifest(self, head: HeadBody, *, at_any_price: bool) -> tuple[bytes, Manifest]:
        """The manifest of a head, from here or from a peer.

        Raises `RequestRefused` if no peer has it, unless it is wanted `at_any_price`;
        `RemoteProtocolError` if the publisher is at fault.
        """
        body = await self._body_here(head.root)
        while body is None:
            body = await self._fetch_body(head)
            if body is None and not at_any_price:
                raise RequestRefused(f"nobody has the manifest of version {head.version}")
            if body is None:
                await trio.sleep(MANIFEST_AGAIN_S)
        try:
            manifest: Manifest = await self.run_sync(manifest_wire.open_manifest, body, head)
        except RemoteProtocolError as error:
            self.gater.ledger.reject(PeerId(head.publisher), error.reason)
            raise
        self._bodies.put(head.root, body)
        return body, manifest

    async def _fetch_body(self, head: HeadBody) -> bytes | None:
        """The manifest's bytes; None: no peer had them. Peers are blamed for other bytes."""
        first = [PeerId(head.publisher), self._told_by.get(head.root)]
        peers = list(self._transport.peers())
        self._rng.shuffle(peers)
        peers.sort(key=lambda peer: first.index(peer) if peer in first else len(first))
        found: list[bytes] = []
        asked: dict[PeerId, trio.CancelScope] = {}  # the longest first
        async with trio.open_nursery() as nursery:
            for peer in peers:
                silent = [each for each in asked if each not in first]
                if len(asked) >= MANIFEST_ASKED_MAX and silent:
                    asked.pop(silent[0]).cancel()
                answered = trio.Event()
                asked[peer] = trio.CancelScope()
                nursery.start_soon(self._ask_body, head, peer, asked, answered, found, nursery)
                with trio.move_on_after(MANIFEST_NEXT_S):
                    await answered.wait()
        return found[0] if found else None

    async def _ask_body(
        self,
        head: HeadBody,
        peer: PeerId,
        asked: dict[PeerId, trio.CancelScope],
        answered: trio.Event,
        found: list[bytes],
        all_asked: trio.Nursery,
    ) -> None:
        """Ask one peer of several; the first that has the bytes cancels the others."""
        request = WantManifest(type="want_manifest", run_id=self.rules.heads.run_id, root=head.root)
        with asked[peer]:
            try:
                body = await self._transport.request(
                    peer,
                    MANIFEST_PROTOCOL,
                    codec.encode(request),
                    timeout_s=MANIFEST_ANSWER_S + head.manifest_bytes / BYTES_PER_S_MIN,
                    response_bytes_max=head.manifest_bytes,
                )
                if await self.run_sync(manifest_wire.root_of, body) == head.root:
                    found.append(body)
                    all_asked.cancel_scope.cancel()
                else:
                    self.gater.ledger.reject(peer, Reject.WRONG_HASH)
            except TransportError:
                pass  # the next one
            except RemoteProtocolError as error:  # longer than was asked for
                self.gater.ledger.reject(peer, error.reason)
        asked.pop(peer, None)
        answered.set()

    async def _follow(self) -> None:
        """Get the newest version, again and again."""
        failures = 0  # in a row
        while True:
            self._news = trio.Event()
            head = self.heads.newest(self.rules.policy)
            current: LocalVersion | None = await self.run_sync(self.versions.current)
            if head is None or (current is not None and current.version >= head.version):
                failures = 0
                await self._news.wait()
                continue
            outcome = await self._get(head)
            if outcome is None:
                continue  # a newer one came
            self._follower.tell(outcome)
            if outcome.applied.failure is not None:
                with trio.move_on_after(RETRY.after(failures)):
                    await self._news.wait()
                failures += 1

    async def _get(self, head: HeadBody) -> VersionOutcome | None:
        """One try to load a version; None: a newer one came."""
        current = self._try = _Try(head.version)
        self._enter(current, "manifest")
        applied: Applied | None = None
        serving = await self.run_sync(self.versions.current)
        try:
            with current.scope:
                applied = await apply_version(
                    head.version,
                    lambda: self._make(head, current),
                    self.versions,
                    self._follower.engine,
                    run_sync=self.run_sync,
                )
        except StorageFailed as error:  # clearing up failed too
            before = None if serving is None else serving.version
            applied = Applied(head.version, before, str(error))
        finally:
            self._try = None
            if applied is None or applied.failure is not None:
                self.sharing.drop(head.version)
        if applied is None:
            self._enter(current, "dropped")
            return None
        if applied.failure is None:
            try:
                await self.run_sync(self._save_head, head.version)
                self.sharing.keep_newest(self.rules.shared_versions)
                await self.run_sync(self.versions.prune)
            except StorageFailed as error:  # it serves, but older versions still take room
                current.doubts.append(str(error))
        is_known = current.is_bound_known and 0.0 < current.bound_s <= current.fetch_s
        bound = current.bound_s if is_known else None  # no fetch is faster than its bound
        return VersionOutcome(
            applied, tuple(current.bases), bound, current.reused_bytes, tuple(current.doubts)
        )

    def _enter(self, current: _Try, phase: str) -> None:
        current.phase = phase
        self._follower.watch(VersionProgress(current.version, phase))

    async def _make(self, head: HeadBody, current: _Try) -> Made:
        """Fetch, verify and patch a version by the cheapest route."""
        for left in reversed(range(ROUTES_MAX)):
            known = await self._learn(head)
            manifests = {version: manifest for version, (_, manifest) in known.items()}
            before = self.versions.states()
            route: tuple[Step, ...] = await self.run_sync(
                cheapest_route, head.version, before, manifests, self._store.has
            )
            try:
                for step in route:
                    await self._take_step(step, known, head, current)
            except WeightsMismatch as error:
                current.doubts.append(str(error))
                if not left or len(self.versions.states()) >= len(before):
                    raise
                continue  # a base is in doubt: another route
            self._enter(current, "load")
            return Made(
                head.version,
                current.fetch_s,
                current.patch_s,
                current.fetched_bytes,
                full_bytes(manifests[head.version]),
            )
        raise WeightsMismatch(f"version {head.version}: no base is what it was")

    async def _learn(self, head: HeadBody) -> dict[int, tuple[bytes, Manifest]]:
        """The manifest of a version, and those of versions between if it has no delta on ours."""
        found = {head.version: await self._manifest(head, at_any_price=True)}
        held = self.versions.states()
        bases = {artifact.base_version for artifact in found[head.version][1].artifacts}
        if not held or max(held) in bases or max(held) >= head.version:
            return found
        between = [each for each in self.heads.older(self.rules.policy) if max(held) < each.version]
        for older in between[:OLDER_MANIFESTS_MAX]:
            try:
                found[older.version] = await self._manifest(older, at_any_price=False)
            except (RequestRefused, RemoteProtocolError):
                continue
        return found

    async def _take_step(
        self,
        step: Step,
        known: dict[int, tuple[bytes, Manifest]],
        newest: HeadBody,
        current: _Try,
    ) -> None:
        body, manifest = known[step.version]
        head = self.heads.of(self.rules.policy, step.version) or newest
        started_s = trio.current_time()
        self._enter(current, "fetch")
        key = ArtifactKey(head.root, manifest.artifacts.index(step.artifact))
        offered = OfferedArtifact(key, step.artifact.chunks, PeerId(head.publisher))
        shared = await self.sharing.fetch(step.version, offered, on_behalf=current.version)
        current.fetch_s += trio.current_time() - started_s
        current.fetched_bytes += shared.fetched_bytes
        current.reused_bytes += step.artifact.size_bytes - shared.missing_bytes
        if shared.fetched_bytes:
            self._count_bound(current, shared.missing_bytes, offered.publisher)
        self._enter(current, "patch")
        started_s = trio.current_time()
        try:
            await self.run_sync(
                snapshots.make,
                step,
                body,
                manifest,
                self.versions,
                self._store,
                self.rules.patch_threads,
            )
        except RemoteProtocolError as error:
            self.gater.ledger.reject(offered.publisher, error.reason)
            raise
        current.bases.append(step.artifact.base_version)
        current.patch_s += trio.current_time() - started_s

    def _count_bound(self, current: _Try, size_bytes: int, publisher: PeerId) -> None:
        """Add the bound of a broadcast of these bytes."""
        up = self.sharing.links.get(publisher, (0, 0))[0]
        peers = self.sharing.peer_links(without=publisher)
        if not up or any(not peer.down_bytes_per_s for peer in peers):
            current.is_bound_known = False
            return
        current.bound_s += bound_s(size_bytes, up, peers)

    async def share_held(self) -> None:
        """Serve stored chunks of the newest complete versions: of older ones only the deltas."""
        held = self.versions.held()[-self.rules.shared_versions :]
        for local in held:
            await self.share(local.version, deltas_only=local is not held[-1])

    async def share(self, version: int, *, deltas_only: bool = False) -> None:
        """Serve the artifacts of a complete version that the store has."""
        body: bytes = await self.run_sync(self.versions.manifest_body, version)
        manifest: Manifest = await self.run_sync(manifest_wire.decode_manifest, body)
        root = manifest_wire.root_of(body)
        for index, artifact in enumerate(manifest.artifacts):
            whole = all(map(self._store.has, artifact.chunks)) and artifact.chunks
            if whole and not (deltas_only and artifact.base_version is None):
                key = ArtifactKey(root, index)
                offered = OfferedArtifact(key, artifact.chunks, manifest.publisher)
                await self.sharing.give(version, offered)
