"""The publisher's side: make a version of a directory, sign its head, report when all peers have
it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from swarm.errors import ConfigError
from swarm.identity import Identity, PeerId
from swarm.weights import manifest as manifest_wire
from swarm.weights import version_store as snapshots
from swarm.weights.broadcast_time import bound_s
from swarm.weights.delta import AUTO_MAP, names_code
from swarm.weights.manifest import Artifact, Manifest, WeightsDirectory, open_weights, state_of
from swarm.weights.weights_service import WeightsService
from swarm.wire import codec
from swarm.wire.messages import HeadBody

VERSIONS_KEPT: Final = 9  # the newest and what it is offered against, to 8 versions back
SPREAD_LOOK_S: Final = 1.0  # between two looks at who has a version


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is on offer."""

    version: int
    size_bytes: int
    full_bytes: int
    delta_bytes: int | None  # of the smallest delta; None: none is offered
    made_s: float  # to hash, cut, copy and announce it
    announced_ago_s: float  # the last of these, when all was done


@dataclass(frozen=True, slots=True)
class Spread:
    """All peers that took part have a version."""

    version: int
    peers: int
    time_s: float  # since it was announced, or since a peer joined that lacked it
    bound_s: float | None  # None: links are unknown, or some peers had it before


class Publisher:
    """Publishes the versions of one policy."""

    def __init__(
        self,
        service: WeightsService,
        identity: Identity,
        tell: Callable[[Spread], None] = lambda spread: None,
    ) -> None:
        self._service = service
        self._identity = identity
        self._tell = tell
        self._manifest: Manifest | None = None  # of the newest version of ours
        self._began_s = 0.0  # when it was announced, or the last look at which nobody lacked it
        self._told = (0, 0)  # version and peers of the last spread that was told of

    async def publish(self, directory: Path, version: int | None = None) -> Published | None:
        """Publish a directory as the next version or under a higher number.

        Returns None if the newest version has the same content and no higher number is asked for.
        Raises `ConfigError` for no weights or a number that is not above the newest,
        `WeightsMismatch` if the directory changed meanwhile, `StoreFull` and `StorageFailed`; the
        version before then stays on offer.
        """
        service, started_s = self._service, trio.current_time()
        new: WeightsDirectory = await service.run_sync(opened, directory)
        newest = service.heads.newest(service.rules.policy)
        held = service.versions.held()
        if (
            held
            and (version is None or version <= held[-1].version)
            and held[-1].state == state_of(new.specs)
            and (newest is None or newest.version <= held[-1].version)
        ):
            await self._offer_again(held[-1].version)
            return None
        least = 1 + max([each.version for each in held[-1:]] + [newest.version if newest else 0])
        if version is not None and version < least:
            raise ConfigError(
                f"version {version}: versions only move forward, take {least} or more"
            )
        number = least if version is None else version
        body, manifest = await service.run_sync(self._make, new, number)
        await service.share(number)
        self._manifest = manifest
        head = self._head(manifest, body)
        announced_s = trio.current_time()
        await service.announce(codec.sign_head(head, self._identity))
        self._began_s = trio.current_time()
        self._let_go(number)
        await service.run_sync(service.versions.prune)
        deltas = [each.size_bytes for each in manifest.artifacts if each.base_version is not None]
        return Published(
            version=number,
            size_bytes=manifest.size_bytes,
            full_bytes=manifest.artifacts[0].size_bytes,
            delta_bytes=min(deltas, default=None),
            made_s=trio.current_time() - started_s,
            announced_ago_s=trio.current_time() - announced_s,
        )

    def _make(self, new: WeightsDirectory, number: int) -> tuple[bytes, Manifest]:
        """Cut the version into chunks, copy it in and make it current. Blocks."""
        service = self._service
        versions, rules = service.versions, service.rules

        def describe(artifacts: tuple[Artifact, ...]) -> Manifest:
            return Manifest(
                run_id=rules.heads.run_id,
                policy=rules.policy,
                version=number,
                publisher=self._identity.peer_id,
                created_at_s=int(service.now_s()),
                tensors=new.specs,
                artifacts=artifacts,
            )

        bases = []
        for base in snapshots.base_versions(number, versions.states()):
            local = versions.get(base)
            if local is None:
                continue
            opened = open_weights(local.directory, versions.manifest(base).tensors)
            if opened.first_difference() is None:
                bases.append((base, opened))
            else:  # somebody changed it: no peer could apply a delta on that
                versions.doubt(base)
        manifest = snapshots.offer(new, bases, service.sharing.store, describe)
        body = manifest_wire.encode_manifest(manifest)
        snapshots.adopt(new, body, versions, number)
        versions.make_current(number)
        return body, manifest

    async def _offer_again(self, version: int) -> None:
        """Announce a version that an earlier process published."""
        service = self._service
        body: bytes = await service.run_sync(service.versions.manifest_body, version)
        manifest: Manifest = await service.run_sync(manifest_wire.decode_manifest, body)
        self._manifest = manifest
        if manifest.publisher != self._identity.peer_id:
            raise ConfigError(
                f"version {version} is here already, published by {manifest.publisher}"
            )
        await service.announce(
            service.heads.record(service.rules.policy, version)
            or codec.sign_head(self._head(manifest, body), self._identity)
        )
        self._began_s = trio.current_time()

    def _let_go(self, newest: int) -> None:
        """Serve only deltas of older versions, for peers that are further behind."""
        service = self._service
        for head in service.heads.older(service.rules.policy):
            if head.version < newest and head.publisher == self._identity.peer_id:
                service.sharing.end(head.root, 0)  # the full artifact comes first
        service.sharing.keep_newest(service.rules.shared_versions)

    def _head(self, manifest: Manifest, body: bytes) -> HeadBody:
        return HeadBody(
            type="weights",
            run_id=manifest.run_id,
            policy=manifest.policy,
            version=manifest.version,
            publisher=manifest.publisher,
            root=manifest_wire.root_of(body),
            manifest_bytes=len(body),
            created_at_s=int(self._service.now_s()),
        )

    async def run(self) -> None:
        """Report when all peers have a version, until cancelled."""
        while True:
            await trio.sleep(SPREAD_LOOK_S)
            manifest = self._manifest
            if manifest is None:
                continue
            sharing = self._service.sharing
            lacking = sharing.unfinished(manifest.version)
            self._tell_of_spread(manifest, lacking)
            peers = sharing.peer_links(without=self._identity.peer_id)
            if not lacking and (self._told[0] == manifest.version or not peers):
                # Peers that join later are timed from here, too long by at most `SPREAD_LOOK_S`.
                self._began_s = trio.current_time()

    def _tell_of_spread(self, manifest: Manifest, lacking: tuple[PeerId, ...]) -> None:
        sharing = self._service.sharing
        finished = sharing.finished(manifest.version)
        first = self._told[0] != manifest.version
        if not first and finished < self._told[1]:  # some left, which is no news
            self._told = (manifest.version, finished)
        if lacking or not finished or self._told == (manifest.version, finished):
            return
        self._told = (manifest.version, finished)
        peers = sharing.peer_links(without=self._identity.peer_id)
        up = sharing.up_bytes_per_s
        bound = None
        if first and up and peers and all(peer.down_bytes_per_s for peer in peers):
            # Most peers fetch the delta on the version before, or else the full artifact.
            usual = max(manifest.artifacts, key=lambda each: each.base_version or -1)
            bound = bound_s(usual.size_bytes, up, peers)
        self._tell(Spread(manifest.version, finished, trio.current_time() - self._began_s, bound))


def opened(directory: Path) -> WeightsDirectory:
    """The weights to publish; `ConfigError` if there are none, or a file names code."""
    new = open_weights(directory)
    if code := names_code(directory, {spec.file for spec in new.specs}):
        raise ConfigError(
            f"weights: {directory / code} names code of its own ({AUTO_MAP}), which receivers "
            "refuse; remove that entry"
        )
    return new
