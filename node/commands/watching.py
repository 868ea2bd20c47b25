"""`swarm-node join --watch`: what a swarm does, seen from one of its connections.

It fetches some groups and checks them as a node does, shows them, and forgets them. To others it is
no peer of the run: nobody waits for it or asks it for anything. It needs no model and no torch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import trio

from node.config import NodeConfig
from node.hosting.fetched_models import ask
from node.hosting.membership import Membership, load_identity
from node.hosting.run_data import have_data
from node.observe.samples import ReadSample, render_samples
from node.observe.text_format import counted, printable, short_id
from node.run.groups import sampled
from node.run.machine import RealWorld
from node.run.peer import Peer, open_peer
from node.verify.held_out import HeldOutGuard
from swarm.command import EXIT_OK, output_failure, output_may_fail
from swarm.errors import ConfigError, SwarmError, first_of
from swarm.exchange.exchange_service import Exchange, ExchangeRules
from swarm.exchange.pool import Candidate, Pool, PoolLimits
from swarm.identity import Identity, PeerId
from swarm.leaving import set_when_asked
from swarm.limits.bounded_table import BoundedTable
from swarm.rollouts import ScoredGroup
from swarm.storage import Runtime, data_directory
from swarm.wire.messages import AdvertBody

LOOK_S: Final = 1.0
SAMPLE_S: Final = 3.0  # between two samples
STOCK_GROUPS: Final = 2  # informative ones that wait to be shown
POOL: Final = PoolLimits(groups_max=64, bytes_max=16 * 1024 * 1024)
FETCH_BYTES_PER_S_MAX: Final = 256 * 1024.0  # watching shall cost a swarm little
MAKERS_MAX: Final = 4096  # groups whose maker is known
TOLD_MAX: Final = 16_384  # groups and takers that were counted
PAIRS_MAX: Final = 1024
LINES_MAX: Final = 8  # of a kind in one look; peers decide how many there would be
PEERS_SHOWN: Final = 8
NOTE_CHARS_MAX: Final = 400

Say = Callable[[str], None]


def watch(config: NodeConfig, say: Say) -> int:
    """Show what the swarm does until interrupted, or for `stop_after_s`. The exit status."""
    if not config.bootstrap:
        raise ConfigError("--watch: whom? give a node's link, or its address with --peer")
    with data_directory(config.data_dir, say=say):
        identity, membership = load_identity(config), Membership.of(config)
        have_data(config, identity, membership, ask(config.yes, by_default=False), say)
        config = config.model_copy(update={"relay": False})
        try:
            with output_may_fail():
                trio.run(_watch, config, identity, membership, say)
        except* SwarmError as group:
            raise first_of(group) from None
    return EXIT_OK


async def _watch(config: NodeConfig, identity: Identity, membership: Membership, say: Say) -> None:
    world = RealWorld("", lambda: 1, say)
    limits, rate = config.run.limits, float(config.fetch_bytes_per_s_max)
    rules = ExchangeRules(
        run_id=config.run.run_id,
        stock_groups=STOCK_GROUPS,
        record_life_s=limits.record_life_s,
        clock_skew_s=limits.clock_skew_s,
        group_size_max=limits.group_size_max,
        group_bytes_max=config.run.group_bytes_max,
        fetch_bytes_per_s=min(rate, FETCH_BYTES_PER_S_MAX),
        serves=False,
    )
    with Pool(":memory:", POOL) as pool:
        async with (
            open_peer(world, config, identity, membership, watches=True) as peer,
            trio.open_nursery() as network,
        ):
            await network.start(peer.run)  # it finds peers while the verifier starts
            async with world.open_verifier(config) as verifier, trio.open_nursery() as nursery:
                exchange = Exchange(
                    rules,
                    identity,
                    peer.transport,
                    pool,
                    HeldOutGuard(config.run, verifier).verify,
                    Runtime(world.now_s, world.rng("exchange"), world.run_sync),
                    peer.gater,
                )
                watcher = Watcher(config, peer, exchange, pool, say)
                leaving = trio.Event()
                nursery.start_soon(set_when_asked, leaving)
                await nursery.start(exchange.run)
                nursery.start_soon(watcher.run, leaving)
                stop_after_s = inf if config.stop_after_s is None else config.stop_after_s
                with trio.move_on_after(stop_after_s):
                    await leaving.wait()
                nursery.cancel_scope.cancel()
            network.cancel_scope.cancel()
    watcher.tell_end()


class Watcher:
    """Collects what is heard and tells of it once in a look, a bounded number of lines each."""

    def __init__(
        self, config: NodeConfig, peer: Peer, exchange: Exchange, pool: Pool, say: Say
    ) -> None:
        self._config = config
        self._peer = peer
        self._exchange = exchange
        self._pool = pool
        self._say = say
        self._makers: BoundedTable[bytes, str] = BoundedTable(MAKERS_MAX)
        self._counted: BoundedTable[tuple[PeerId, bytes], None] = BoundedTable(TOLD_MAX)
        self._totals: BoundedTable[tuple[PeerId, str], int] = BoundedTable(PAIRS_MAX)
        self._offered: Counter[tuple[str, int]] = Counter()  # since the last look, as the next
        self._fed: Counter[tuple[PeerId, str]] = Counter()
        self._groups = self._shown = 0
        self._refused: Counter[str] = Counter()
        self._notes: set[str] = set()
        exchange.on_advert = self._hear_advert
        peer.ledger.credit.on_told = self._hear_trained

    def _hear_advert(self, advert: AdvertBody) -> None:
        self._groups += len(advert.groups)
        if len(self._offered) < PAIRS_MAX:
            self._offered[(advert.producer, advert.round)] += len(advert.groups)
        for each in advert.groups:
            self._makers.put(each.group_id, advert.producer)

    def _hear_trained(self, taker: PeerId, group_ids: Sequence[bytes]) -> None:
        for each in group_ids:
            maker = self._makers.get(each)
            if maker is not None and (taker, each) not in self._counted:
                self._counted.put((taker, each), None)
                self._fed[(taker, maker)] += 1

    async def run(self, leaving: trio.Event) -> None:
        """Look until cancelled; `leaving` is set once nobody reads."""
        run = self._config.run
        self._say(f"watching run {run.run_id}; nothing is trained or shared; Ctrl-C ends it")
        if run.learner is not None:
            self._say(
                "this run has a learner, which gets its workers' groups without adverts: only "
                "groups that other nodes share are shown"
            )
        peers: set[PeerId] = set()
        sample_at = trio.current_time()
        while True:
            if peers != (peers := set(self._peer.discovery.peers)):
                names = ", ".join(map(short_id, sorted(peers)[:PEERS_SHOWN]))
                self._say(f"{counted(len(peers), 'peers')} of the run: {names or 'none'}")
            self._tell_heard()
            self._tell_refused()
            if trio.current_time() >= sample_at and await self._tell_sample():
                sample_at = trio.current_time() + SAMPLE_S
            if output_failure() is not None:
                leaving.set()
            await trio.sleep(LOOK_S)

    def _tell_heard(self) -> None:
        """The most frequent offers and uses since the last look."""
        for (maker, number), count in self._offered.most_common(LINES_MAX):
            told = f"offers {counted(count, 'groups')} of its round {number}"
            self._say(f"{short_id(maker)} {told}")
        for pair, count in self._fed.most_common(LINES_MAX):
            total = (self._totals.get(pair) or 0) + count
            self._totals.put(pair, total)
            taker, maker = pair
            groups = f"{counted(count, 'groups')} of {short_id(maker)}"
            self._say(f"{short_id(taker)} trained on {groups}, {total} so far")
        self._offered.clear()
        self._fed.clear()

    def _tell_refused(self) -> None:
        rejected = Counter({str(why): n for why, n in self._peer.ledger.rejected.items()})
        for why, count in sorted((rejected - self._refused).items()):
            self._say(f"refused here: {counted(count, 'records')} ({why})")
        self._refused = rejected
        for note in self._peer.discovery.notes[:LINES_MAX]:
            if note not in self._notes and len(self._notes) < PAIRS_MAX:
                self._notes.add(note)
                self._say(f"! {printable(note, NOTE_CHARS_MAX)}")

    async def _tell_sample(self) -> bool:
        """Show the newest group that was found good, and make room for newer ones."""
        found = await self._exchange.candidates()
        if not found:
            return False
        chosen = max(found, key=lambda each: each.created_at_s)
        groups = await self._exchange.look([chosen.group_id])
        await trio.to_thread.run_sync(self._forget, found)
        self._exchange.fetcher.wake()
        for each in groups:
            self._shown += 1
            self._say(f"\n{self._rendered(each)}\n")
        return True

    def _forget(self, found: Sequence[Candidate]) -> None:
        self._pool.mark_trained([each.group_id for each in found], 0)

    def _rendered(self, group: ScoredGroup) -> str:
        """The completions with the highest and the lowest reward."""
        read = sampled(self._config.run, group.group.round, group)
        ordered = sorted(set(read.texts), key=lambda text: -text.reward)
        shown = ordered[:1] + ordered[1:][-1:]
        return render_samples([ReadSample(group.group.created_at_s, read, each) for each in shown])

    def tell_end(self) -> None:
        """Sum up, and say how to take part."""
        ledger = self._peer.ledger
        self._say(
            f"{counted(self._groups, 'groups')} heard of, {ledger.accepted} fetched and found "
            f"good, {ledger.rejected.total()} refused, {self._shown} shown; the same command "
            "without --watch takes part"
        )
