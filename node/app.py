"""The composition root: builds one production node, runs it, takes it down in order.

    lock and key          the data directory belongs to one process
    policy                made or fetched before anything listens
    transport             libp2p
    verifier              worker processes with a time limit
    network services      exchange and discovery; they outlive the trainer
    trainer and engine    restarted with back-off when they die
    rounds                until done or told to leave

Everything lives in one nursery, so that leaving it ends everything, children included.
"""

import errno
import gc
import os
import secrets
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from random import Random

import psutil
import trio

from node.checkpoints import Checkpoint, Checkpoints
from node.config import DEFAULT_RUN, NodeConfig, packaged_runs
from node.doctor import examine
from node.engines.base import Maker, RolloutEngine
from node.engines.hosts import PARAMETER_BYTES, base_directory, first_answer_counts
from node.engines.policy_files import policy_files
from node.engines.vllm_engine import open_vllm
from node.engines.vllm_server import ServerFailed
from node.evaluation import PassRate, evaluate
from node.hand_over import EngineHandOver, device_plan, share_left
from node.machine import core_count, counted, threads_of
from node.membership import Membership
from node.models import TINY, resolve_model, tiny_directory
from node.monitor.events import EventLog, Record
from node.monitor.live import LiveView
from node.monitor.progress import Work, on_stderr
from node.monitor.records import Banned, HeldOut, RoundDone, Started, StatusSnapshot, Trouble
from node.monitor.reporting import Extras, Reporter, Traffic
from node.monitor.status import serve_status
from node.node import Node, World
from node.sapo import HandOver, Progress
from node.tasks.verifier import ProcessVerifier
from node.telemetry import Sources, Telemetry, broker_of, machine_of
from node.training.base import PolicyInfo, Trainer
from node.training.process import TrainerProcess, open_trainer
from node.training.ranks import Ranks
from node.training.spec import TrainerSpec
from swarm.errors import ChildFailed, ConfigError, IdentityInUse, StorageFailed, first_of
from swarm.exchange.pool import Pool, PoolLimits
from swarm.identity import Identity
from swarm.peers.address_book import AddressBook
from swarm.peers.mdns import LanUnavailable, announced, run_lan, tag_of
from swarm.peers.reputation import Ban
from swarm.peers.upnp import keep_mapped
from swarm.rollouts import is_quantised
from swarm.storage.locking import data_directory
from swarm.storage.private_files import private_files
from swarm.telemetry.broker_address import PASSWORD_VARIABLE
from swarm.telemetry.mqtt import publisher_of
from swarm.telemetry.reports import Role
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.reach.reachability import ReachRules

AGENT = f"swarm-node/{version('swarm-node')}"
EVENTS_FILE = "events.jsonl"
VIEW_INTERVAL_S = 0.5
RESTART_DELAY_S = 1.0  # doubled at each failure in a row
DAMAGED = "checkpoint damaged"  # how the trainer's word on a checkpoint begins
RESTARTS_MAX = 5  # failures in a row without a finished round between them
ENGINE_NOTE = "engine"
EXIT_INTERRUPTED = 130
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}


@dataclass(slots=True)
class _Loaded:
    """What `status` says of the trainer; survives its restarts."""

    policy: PolicyInfo | None = None
    memory_bytes: int = 0


def load_identity(config: NodeConfig) -> Identity:
    """The node's key, made at the first start.

    Raises:
        ConfigError: the key file cannot be used.
    """
    passphrase = os.environ.get(config.passphrase_env)
    if not config.key_path.exists():
        if config.key_file is not None:
            raise ConfigError(
                f"--key-file {config.key_file}: no such file; make it with "
                f"swarm-node keygen --out {config.key_file}"
            )
        Identity.generate().save(config.key_path, passphrase)
    return Identity.load(config.key_path, passphrase)


def checkpoints_of(config: NodeConfig) -> Checkpoints:
    """The node's checkpoints; another run or model than before is refused."""
    return Checkpoints(
        config.data_dir / "checkpoints",
        config.checkpoints_kept,
        {"run_id": config.run.run_id, "model": config.model},
    )


def trainer_spec(config: NodeConfig, model: str) -> TrainerSpec:
    """The trainer of this node; `model` is a directory or a hub id."""
    return TrainerSpec(
        model,
        learning_rate=config.learning_rate,
        updates_per_batch=config.updates_per_batch,
        micro_batch_tokens=config.micro_batch_tokens,
        completion_tokens_max=config.run.sampling.max_new_tokens,
        foreign_logprob_min=config.foreign_logprob_min,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_targets=config.lora_targets,
        writes_merged=config.merges_adapters,
        gpu_share_left=share_left(config),
        **config.run.training.model_dump(),
        seed=config.seed,
        threads=config.threads,
    )


def evaluate_node(config: NodeConfig, say: Callable[[str], None]) -> tuple[int, PassRate]:
    """The last checkpoint's round and its held-out pass rate, without a network; 0 and the fresh
    policy's if there is no checkpoint yet.

    Raises:
        ConfigError: there is no such directory, or the checkpoint is of another run or model.
    """
    if not config.data_dir.is_dir():
        raise ConfigError(f"--data-dir {config.data_dir}: no such directory; name a node's")
    model = resolve_model(config, say)
    saved = checkpoints_of(config).latest()
    if saved is None:
        say(f"{config.data_dir}: no checkpoint yet; this is the model as it was before training")

    async def measure() -> PassRate:
        async with (
            open_trainer(
                trainer_spec(config, model), config.data_dir, saved.directory if saved else None
            ) as trainer,
            ProcessVerifier.open(config) as verifier,
        ):
            return await evaluate(config.run, trainer, verifier)

    try:
        with (
            private_files(),
            on_stderr().showing(f"evaluating on {config.run.held_out.tasks} held-out tasks"),
        ):
            return saved.progress.round if saved else 0, trio.run(measure)
    except* (ConfigError, ChildFailed) as group:
        raise first_of(group) from None


def examine_here(config: NodeConfig, say: Callable[[str], None]) -> int:
    """What `swarm-node doctor` does. Returns the exit status."""
    tiny = config.model == TINY
    model = str(tiny_directory(config.run, config.cache_dir)) if tiny else config.model
    is_worker = config.run.learner is not None and config.role == "worker"
    spec = None if is_worker else trainer_spec(config, model)
    return examine(config, spec, say, time.time)


def run_node(
    config: NodeConfig, view: LiveView, say: Callable[[str], None], kind: "type[App] | None" = None
) -> int:
    """Run a node until it is done or told to leave. Returns the exit status. `kind` None: one that
    learns from shared rollouts.

    Raises:
        ConfigError: bad input, found before anything started.
        IdentityInUse: another live node runs under this key.
    """
    with data_directory(config.data_dir, say=say):
        identity = load_identity(config)
        membership = Membership.of(config)
        kind = kind or App
        kind.check(config, identity)
        model = kind.model_of(config, say)
        app = kind(config, identity, membership, model, view, say)
        try:
            return trio.run(app.run)
        except* (ConfigError, IdentityInUse, ChildFailed) as group:
            raise first_of(group) from None
        except* (sqlite3.OperationalError, OSError) as group:
            error = first_of(group)
            if isinstance(error, OSError) and error.errno not in STORAGE_ERRORS:
                raise  # not the disk: a bug of ours, which shall be seen whole
            raise StorageFailed(
                f"--data-dir {config.data_dir}: {error}; what the last checkpoint holds is safe"
            ) from group


def keep_what_is_loaded() -> None:
    """Take what has been imported and built so far out of Python's search for garbage: each full
    search would go through it, and take the event loop 100 ms."""
    gc.collect()
    gc.freeze()


class App:
    """A node of a run without a learner; the kinds of node that a learner makes differ in how they
    work (`_work`)."""

    ROLE: Role = "node"  # in its reports

    @classmethod
    def check(cls, config: NodeConfig, identity: Identity) -> None:
        """Refuse settings that this kind of node has no use for.

        Raises:
            ConfigError: they are such.
        """

    @classmethod
    def model_of(cls, config: NodeConfig, say: Callable[[str], None]) -> str:
        """The policy to begin with, made if need be: a directory or a hub id."""
        return resolve_model(config, say)

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        membership: Membership,
        model: str,
        view: LiveView,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._membership = membership
        self._model = model
        self._view = view
        self._say = say
        self._loaded = _Loaded()
        self._process = psutil.Process()
        self._checkpoints = checkpoints_of(config)
        self._loading: trio.CancelScope | None = None  # while the trainer is being opened
        self._ranks: Ranks | None = None  # of the trainer, where several processes make it up
        self._extras: Callable[[], Extras] = Extras  # what this kind of node reports besides
        self._starting: set[str] = set()  # by name, for bars
        self._threads_said = (0, 0)  # cores and nodes that share them
        self._has_served = False  # a vLLM of this process
        self._unanswered: Counter[str] = Counter()  # of those who ask for status and metrics
        self._broker = broker_of(config, os.environ.get(PASSWORD_VARIABLE))

    async def run(self) -> int:
        self._leaving = trio.Event()
        config = self._config
        resumed = self._checkpoints.latest()
        with (
            Pool(
                config.data_dir / "pool.sqlite",
                PoolLimits(
                    config.pool_groups_max, config.pool_bytes_max, config.pool_groups_per_peer_max
                ),
            ) as pool,
            EventLog(config.data_dir / EVENTS_FILE, time.time) as self._events,
            counted() as self._nodes_here,
        ):
            async with AsyncExitStack() as stack:
                transport = await stack.enter_async_context(
                    open_libp2p(
                        self._identity,
                        config.listen,
                        config.announce,
                        network_key=self._membership.network_key,
                        reach=ReachRules(relay=config.relay),
                    )
                )
                verifier = await stack.enter_async_context(ProcessVerifier.open(config))
                self._transport, self._verifier = transport, verifier
                self._node = Node(
                    config,
                    self._identity,
                    transport,
                    pool,
                    verifier,
                    AddressBook.load(config.data_dir / "addresses.json"),
                    World(
                        now_s=time.time,
                        rng=Random(secrets.randbits(64)),  # whom to dial and fetch from
                        run_sync=trio.to_thread.run_sync,
                        instance=secrets.token_bytes(16),
                        agent=AGENT,
                        admits=self._membership.admits,
                        can_be_dialled=lambda: (
                            transport.reach is None or transport.reach.reachable is not False
                        ),
                        dht=config.dht and self._membership.key is None,
                    ),
                )
                self._node.warden.on_ban = self._tell_ban
                self._telemetry = self._make_telemetry()
                if pool.damaged_path is not None:
                    self._node.notes["pool"] = (
                        f"the pool file was damaged and moved to {pool.damaged_path}"
                    )
                if resumed is not None:
                    self._say(f"resuming after round {resumed.progress.round}")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch_signals)
                    await nursery.start(self._node.run_network)
                    await nursery.start(
                        serve_status, config.data_dir, self._snapshot, self._unanswered
                    )
                    self._greet(transport.addresses())
                    nursery.start_soon(self._look_on_the_lan, transport.addresses())
                    nursery.start_soon(self._ask_the_router, transport)
                    nursery.start_soon(self._show, transport)
                    nursery.start_soon(self._telemetry.run)
                    await self._serve_metrics(nursery)
                    keep_what_is_loaded()
                    await self._work()
                    nursery.cancel_scope.cancel()
        return 0

    def _greet(self, addresses: tuple[str, ...]) -> None:
        name = self._config.run.name
        run = f" --run {name if name in packaged_runs() else 'THIS-RUN-FILE'}"
        if name == DEFAULT_RUN:
            run = ""
        self._say(f"this node is {self._identity.peer_id}, run {self._config.run.run_id}")
        if self._membership.key is not None:
            self._say("this swarm is private: this prints an invitation for the next machine:")
            self._say(f"  swarm-node invite --data-dir {self._config.data_dir}")
            return
        self._say("the next machine joins with any one of these lines:")
        for address in addresses:
            self._say(f"  swarm-node join --peer {address}{run}")

    async def _look_on_the_lan(self, addresses: Sequence[str]) -> None:
        """Nodes that listen on loopback alone are nobody's neighbours."""
        own = announced(addresses)
        if not self._config.lan or not own:
            return
        tag = tag_of(self._config.run.run_id, self._membership.key)
        found = partial(self._node.discovery.learn_found, by="the local network")
        try:
            await run_lan(self._identity.peer_id, tag, own, found)
        except LanUnavailable as error:
            self._node.notes["lan"] = f"no discovery on the local network: {error}"

    async def _ask_the_router(self, transport: Libp2pTransport) -> None:
        """Whether it forwards our port shows when peers dial back."""
        ports = [int(address.split("/")[4]) for address in announced(transport.own_addresses())]
        if self._config.upnp and ports:
            await keep_mapped(ports[0], lambda _: transport.check_reach())

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if self._leaving.is_set():
                    os._exit(EXIT_INTERRUPTED)  # the children end with their pipes
                self._leaving.set()
                if self._loading is not None:  # nothing has been trained that is not saved
                    self._loading.cancel()
                self._say("leaving: saving first; once more to leave at once")

    async def _show(self, transport: Libp2pTransport) -> None:
        while True:
            reach = transport.reach
            if reach is not None and reach.reachable is False and not reach.relays:
                self._node.notes["reach"] = (
                    "others cannot dial this node, and no peer relays for it: swarm-node doctor "
                    "says what to do"
                )
            else:
                self._node.notes.pop("reach", None)
            self._view.update(self._snapshot())
            self._view.works(self._works())
            await trio.sleep(VIEW_INTERVAL_S)

    def _works(self) -> list[Work]:
        """What takes long just now."""
        works = [Work(name) for name in self._starting]
        if self._loading is not None:
            works.append(Work("loading the policy"))
        if self._node.phase == "evaluating":
            works.append(Work(f"evaluating on {self._config.run.held_out.tasks} held-out tasks"))
        if self._node.phase == "saving":
            works.append(Work("saving a checkpoint"))
        stock = self._node.exchange.catching_up()
        if stock is not None:
            works.append(Work("fetching groups of others", *stock))
        return works

    def _snapshot(self) -> StatusSnapshot:
        policy = self._loaded.policy
        return self._node.snapshot(
            model=policy.name if policy else self._config.model,
            parameters=policy.parameters if policy else 0,
            memory_bytes=self._process.memory_info().rss,
            trainer_memory_bytes=self._loaded.memory_bytes,
        )

    def _make_telemetry(self) -> Telemetry:
        config, run_id = self._config, self._config.run.run_id
        instance = secrets.token_hex(8)
        publisher = None
        if self._broker is not None:
            rng = Random(secrets.randbits(64))
            publisher = publisher_of(self._broker, self._identity, run_id, instance, rng)
        return Telemetry(
            Reporter(
                self._identity.peer_id,
                run_id,
                self.ROLE,
                AGENT,
                instance=instance,
                interval_s=config.telemetry_interval_s,
            ),
            self._identity,
            run_id,
            Sources(
                self._snapshot,
                lambda: Traffic(self._transport.counters, self._transport.peers()),
                lambda: self._extras(),
                lambda: machine_of(config.data_dir),
            ),
            self._node.notes,
            interval_s=config.telemetry_interval_s,
            publisher=publisher,
            now_s=time.time,
            run_sync=trio.to_thread.run_sync,
        )

    async def _serve_metrics(self, nursery: trio.Nursery) -> None:
        address = self._config.metrics_listen
        if address is None:
            return
        from node.metrics_page import serve_metrics  # what it needs, nodes without it do without

        serve = partial(serve_metrics, names=self._config.web_names)
        port = await nursery.start(
            serve,
            address,
            lambda: self._telemetry.latest,
            self._unanswered,
            lambda text: self._tell(Trouble(text)),
        )
        self._say(f"metrics for Prometheus: http://{address.rpartition(':')[0]}:{port}/metrics")

    async def _tell_ban(self, ban: Ban) -> None:
        until_s = time.time() + ban.until - trio.current_time()
        await self._tell(Banned(ban.subject, ban.is_block, ban.why, until_s, ban.number))

    async def _tell(self, record: Record) -> None:
        await trio.to_thread.run_sync(self._events.write, record)
        self._telemetry.reporter.note(record)
        self._view.update(self._snapshot())
        self._view.event(record)

    # --- the trainer and its rounds --------------------------------------------------------

    async def _work(self) -> None:
        """What this kind of node does, until it is done or told to leave."""
        await self._train_to_the_end()

    async def _train_to_the_end(self) -> None:
        """Run rounds; restart the trainer from the last checkpoint when it or its engine dies.

        Raises:
            ChildFailed: it died `RESTARTS_MAX` times without finishing a round in between, or
                at all where torchrun starts its ranks: then it is torchrun that starts again.
        """
        failures = 0
        while True:
            before = self._node.progress.round
            try:
                await self._train_once()
            except* ChildFailed as group:
                error = first_of(group)
                if self._ranks is not None:
                    await self._tell(Trouble(f"the trainer failed: {error}"))
                    raise
                failures = 1 if self._node.progress.round > before else failures + 1
                what = "vLLM" if isinstance(error, ServerFailed) else "the trainer"
                await self._tell(Trouble(f"{what} failed and is restarted: {error}"))
                self._node.notes["trainer"] = f"{what} failed {failures} times: {error}"
                if failures >= RESTARTS_MAX:
                    raise
            else:
                return
            with trio.move_on_after(RESTART_DELAY_S * 2**failures):
                await self._leaving.wait()
                return

    async def _train_once(self) -> None:
        resumed = self._checkpoints.latest()
        progress = resumed.progress if resumed else Progress()
        spent = max(progress.next_index, self._checkpoints.reserved())
        progress = progress.with_next_index(spent)
        async with AsyncExitStack() as stack:
            with trio.CancelScope() as self._loading:
                trainer = await self._open_trainer(stack, resumed)
            self._loading = None
            if self._leaving.is_set():
                return
            self._loaded.policy = await trainer.info()
            await self._learn(trainer, progress, resumed)

    async def _learn(
        self, trainer: TrainerProcess, progress: Progress, resumed: Checkpoint | None
    ) -> None:
        """What this kind of node does with a trainer that is loaded, until it is done or told to
        leave. `progress`: what there was when it was `resumed`.

        Raises:
            ExceptionGroup: of `ChildFailed`; it is started again.
        """
        policy = self._loaded.policy
        assert policy is not None
        if not policy.clipping_active:
            self._say("one update per batch: every ratio is 1, so clipping is inactive")
        if policy.adapted:
            self._say(f"training an adapter {policy.adapted}")
        await self._tell(self._started(policy, progress))
        async with self._engine(trainer) as (engine, hand_over):
            await self._note_maker(engine.maker)
            await self._node.run_rounds(
                trainer,
                engine,
                progress,
                leaving=self._leaving,
                on_record=lambda record: self._after_record(record, trainer),
                checkpoints=self._checkpoints,
                hand_over=hand_over,
            )

    async def _open_trainer(
        self, stack: AsyncExitStack, resumed: Checkpoint | None
    ) -> TrainerProcess:
        """A trainer that ends with the stack. A checkpoint that does not load is put aside.

        Raises:
            ChildFailed: it failed; the next try takes the checkpoint before.
        """
        directory = resumed.directory if resumed else None
        spec = replace(trainer_spec(self._config, self._model), threads=await self._threads())
        try:
            return await stack.enter_async_context(
                open_trainer(spec, self._config.data_dir, directory, self._ranks)
            )
        except ConfigError as error:
            if resumed is None or not str(error).startswith(DAMAGED):
                raise
            aside = self._checkpoints.put_aside(resumed)
            raise ChildFailed(f"{error}; moved to {aside}") from None

    async def _threads(self) -> int:
        """How many the trainer takes, and how many its engine, which rests while it trains. Ranks
        that torchrun started share the cores among themselves."""
        wanted = self._config.threads
        if wanted or self._ranks is not None:
            return wanted
        cores, nodes = core_count(), await trio.to_thread.run_sync(self._nodes_here)
        threads = threads_of(cores, nodes)
        if self._threads_said != (cores, nodes):
            self._threads_said = (cores, nodes)
            who = f"{nodes} nodes share" if nodes > 1 else "one node has"
            self._say(f"{who} {cores} cores here: torch takes {threads} (--threads)")
        return threads

    @asynccontextmanager
    async def _engine(
        self, trainer: TrainerProcess
    ) -> AsyncIterator[tuple[RolloutEngine, HandOver | None]]:
        """The rollout engine, and what hands it each new policy; the torch engine is the trainer
        itself and needs no handing over."""
        config = self._config
        if config.engine == "torch":
            yield trainer, None
            return
        if config.engine != "vllm":
            raise ConfigError(f"--engine {config.engine}: not for a node; use torch or vllm")
        info = await trainer.info()
        merged = config.lora_rank == 0 or config.merges_adapters
        size_bytes = info.parameters * PARAMETER_BYTES
        plan = device_plan(config, info)

        async def tell(text: str) -> None:
            await self._tell(Trouble(text))

        with (
            policy_files(config.data_dir, size_bytes, merged=merged) as files,
            self._under_way("starting vLLM") as started,
        ):
            policy = await files.export(trainer, info.policy_version)
            opened = open_vllm(
                policy if merged else base_directory(self._model),
                config.data_dir,
                adapter=None if merged else policy,
                threads=await self._threads(),
                context_tokens=info.context_tokens,
                policy_version=info.policy_version,
                update_mode=config.engine_update,
                quantization=config.engine_quantization,
                reference=lambda _, rows: trainer.logprobs(rows),  # of what it has just written
                gpu_memory_share=plan.gpu_memory_share,
                sleeps=plan.sleeps,
                tell=tell,
            )
            async with AsyncExitStack() as stack:
                with first_answer_counts(has_served=self._has_served):
                    engine = await stack.enter_async_context(opened)
                self._has_served = True
                started()
                self._say(engine.sizes)
                yield (
                    engine,
                    EngineHandOver(
                        *(trainer, engine, files, tell),
                        shares_device=plan.shared,
                        sleeps=plan.sleeps,
                    ),
                )

    async def _note_maker(self, maker: Maker) -> None:
        """Keep for `status` what samples here; where its weights are quantised, say so once."""
        self._node.precision = maker.precision
        if not is_quantised(maker.precision):
            self._node.notes.pop(ENGINE_NOTE, None)
            return
        note = (
            f"the engine samples with quantised weights ({maker.precision}): its log-probs are "
            "other than a trainer's, and its groups say so"
        )
        if self._node.notes.get(ENGINE_NOTE) != note:
            self._node.notes[ENGINE_NOTE] = note
            await self._tell(Trouble(note))

    @contextmanager
    def _under_way(self, name: str) -> Iterator[Callable[[], None]]:
        """A bar until the block ends, or until what is yielded is called."""
        self._starting.add(name)
        try:
            yield lambda: self._starting.discard(name)
        finally:
            self._starting.discard(name)

    async def _after_record(self, record: RoundDone | HeldOut, trainer: Trainer) -> None:
        self._node.notes.pop("trainer", None)
        self._loaded.memory_bytes = await trainer.memory_bytes()
        await self._tell(record)

    def _started(self, policy: PolicyInfo, progress: Progress) -> Started:
        config = self._config
        return Started(
            peer_id=self._identity.peer_id,
            run_id=config.run.run_id,
            agent=AGENT,
            model=policy.name,
            parameters=policy.parameters,
            tokenizer=policy.tokenizer,
            engine=config.engine,
            round=progress.round,
            seed=config.seed,
            local_groups=config.local_groups,
            external_groups=config.external_groups,
            group_size=config.group_size,
            addresses=self._node.addresses(),
        )
