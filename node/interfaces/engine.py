"""The one protocol of rollout engines: prompts in, sampled completions with their log-probs out."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Protocol

import trio

from node.methods.drafts import Draft
from node.methods.generation import Speculative
from swarm.errors import ConfigError, LocalProtocolError
from swarm.rollouts import Completion, FinishReason

Tell = Callable[[str], Awaitable[None]]  # reports an event to the operator of the node
Record = Literal["entropies", "runners_up", "hidden"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. Generation stops at EOS, which the record keeps, or at the limit."""

    temperature: float = 1.0  # > 0
    top_p: float = 1.0  # 0 < top_p <= 1
    max_new_tokens: int = 64

    @property
    def is_whole(self) -> bool:
        """True if any token may be sampled. Only then are an engine's log-probs comparable with a
        trainer's, which are over the whole vocabulary."""
        return self.top_p == 1.0

    def check(self, completions_each: int) -> None:
        """Refuse settings that no engine can sample with."""
        if self.temperature <= 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ConfigError(
                f"sampling {self}: take temperature > 0, 0 < top_p <= 1, max_new_tokens >= 1"
            )
        if completions_each < 1:
            raise ConfigError(f"completions_each = {completions_each}: take at least 1")


def extend_spans(spans: list[tuple[int, int]], policy_version: int, count: int) -> None:
    """Attribute `count` more tokens to a version."""
    if count and spans and spans[-1][0] == policy_version:
        spans[-1] = (policy_version, spans[-1][1] + count)
    elif count:
        spans.append((policy_version, count))


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine that sampled a rollout group, as the group names it."""

    engine: str  # `torch`, `vllm`, `openai`, `scripted`
    precision: str = ""  # `float32`, `bfloat16`, or how weights are quantised: `fp8`; empty: unsaid


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional parts of `Engine` that an engine has."""

    requests: bool = False  # limits, temperatures and seeds of single requests
    beginnings: bool = False  # of requests
    records: frozenset[Record] = frozenset()
    noise: bool = False  # on the scales of normalisation layers
    turns: bool = False  # `go_on`
    drafts: bool = False  # `redraft`
    partial: bool = False  # `begin`, `advance`, `collect`
    loads: bool = True  # takes weights
    counts: bool = False  # `take_sampled`, where completions carry no tokens


@dataclass(frozen=True, slots=True)
class Request:
    """Completions wanted of one prompt."""

    prompt: str
    n: int = 1
    limit: int | None = None  # tokens of a completion, the beginning included; None: the sampling's
    temperature: float | None = None  # None: the sampling's
    beginning: tuple[int, ...] = ()  # token ids of the engine's tokenizer that all continue
    beginning_logprobs: tuple[float, ...] = ()  # natural log; empty: the present policy's
    record: frozenset[Record] = frozenset()
    seed: int | None = None  # None: the call's

    def settings(self, sampling: Sampling) -> Sampling:
        """The sampling with this request's own limit and temperature."""
        return replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens if self.limit is None else self.limit,
            temperature=sampling.temperature if self.temperature is None else self.temperature,
        )


def plain_requests(prompts: Sequence[str], completions_each: int) -> list[Request]:
    return [Request(prompt, completions_each) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Columns of one completion, one entry for each token; empty where nobody asked."""

    entropies: tuple[float, ...] = ()  # nats, of the distribution that was sampled from
    # the second likeliest token's id, the likeliest token's probability, the second's
    runners_up: tuple[tuple[int, float, float], ...] = ()
    hidden: tuple[float, ...] = ()  # last layer's state after the last token (H,), fp32


@dataclass(frozen=True, slots=True)
class Outcome:
    """Completions of one request. Their columns include the beginning, which ends at the splice.
    The last two fields are of methods, and no engine sets them."""

    completions: tuple[Completion, ...]
    recorded: tuple[Recorded, ...] = ()  # one for each; empty: nothing was asked for
    weights: tuple[float, ...] = ()  # of each one's loss; empty: as the request's
    private: bool = False  # they are no plain samples, and are not shared


@dataclass(frozen=True, slots=True)
class Context:
    """The transcript that a policy's next turn continues: a prompt, and its turns so far."""

    prompt: str
    turns: tuple[tuple[tuple[int, ...], str], ...]  # sampled ids, end included; the reply to them
    tokens_max: int  # of the next turn


NO_TURN: Final = Completion("", (), (), FinishReason.LENGTH, 0)  # for a context without room


class PendingGroup(Protocol):
    """Unfinished completions of one prompt, at the engine that began them."""

    @property
    def done(self) -> bool:
        """True if all have ended."""
        ...


class Engine(Protocol):
    """Generates with one policy version at a time.

    The function or context manager that makes an engine starts it. Weights may be loaded during
    sampling: either the rest uses the new weights, or the load waits. Spans name the version of
    each token. A subclass overrides `generate` or `sample`, of which each calls the other, and the
    methods that its `capabilities` name.
    """

    capabilities: Capabilities = Capabilities()
    maker: EngineInfo  # complete once the engine has started
    paused_s: float | None = None  # how long the last load stopped sampling; None: all of the load

    @property
    def alive(self) -> bool:
        """True if it can sample, or restarts its own process when asked to."""
        return True

    async def close(self) -> None:
        """End it. May be called again."""
        await trio.lowlevel.checkpoint()

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        """`completions_each` completions for each prompt, in their order; none for a prompt that
        does not fit the context. The same version, arguments and seed give the same completions.

        Raises:
            ChildFailed: the engine died or answered with an error; it may be retried.
        """
        requests = plain_requests(prompts, completions_each)
        return [each.completions for each in await self.sample(requests, sampling, seed)]

    async def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, noise: float = 0.0
    ) -> list[Outcome]:
        """The outcome of each request, in their order. Plain requests with one `n` give exactly
        what `generate` gives.

        `noise`: standard deviation of Gaussian noise on the scales of normalisation layers during
        this call (QeRL, arXiv 2510.11696). Log-probs are of the noisy policy.

        Raises:
            ChildFailed: as `generate`.
            ConfigError: as `check_requests`.
        """
        self.check_requests(requests, sampling, noise)
        alike: dict[tuple[int, Sampling, int], list[int]] = {}
        for at, each in enumerate(requests):
            own = seed if each.seed is None else each.seed
            alike.setdefault((each.n, each.settings(sampling), own), []).append(at)
        made: dict[int, Outcome] = {}
        for number, ((n, settings, own), places) in enumerate(alike.items()):
            prompts = [requests[at].prompt for at in places]
            # other random numbers in each call, for the same prompt may be in several
            groups = await self.generate(prompts, n, settings, own ^ (number << 32))
            made.update(zip(places, map(Outcome, groups), strict=True))
        return [made[at] for at in range(len(requests))]

    def check_requests(
        self, requests: Sequence[Request], sampling: Sampling, noise: float = 0.0
    ) -> None:
        """ConfigError: no engine can do this, or this one lacks what it takes."""
        if noise < 0:
            raise ConfigError(f"noise = {noise}: take at least 0")
        for each in requests:
            each.settings(sampling).check(each.n)
            if each.beginning_logprobs and len(each.beginning_logprobs) != len(each.beginning):
                raise ConfigError("a beginning with another number of log-probs than of tokens")
        can, named = self.capabilities, f"the engine {self.maker.engine}"
        recorded = {record for each in requests for record in each.record}
        for record in sorted(recorded - can.records):
            raise ConfigError(f"{named} records no {record}")
        if not can.beginnings and any(each.beginning for each in requests):
            raise ConfigError(f"{named} continues no beginnings")
        if not can.noise and noise:
            raise ConfigError(f"{named} adds no noise")
        if not can.requests and any(
            each.settings(sampling) != sampling or each.seed is not None for each in requests
        ):
            raise ConfigError(f"{named} takes no limit, temperature or seed of a single request")

    async def load(self, weights: Path, policy_version: int) -> None:
        """Replace the policy by the Hugging Face model directory `weights`.

        Raises:
            ChildFailed: the load failed; the old version continues to serve.
        """
        raise NotImplementedError

    def take_sampled(self) -> int:
        """The tokens sampled since the last call, for engines whose completions carry none."""
        raise self._lacks("counts")

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        """The next turn of each transcript, from its sampled ids; `NO_TURN` if the context is
        full."""
        raise self._lacks("turns")

    async def redraft(
        self, drafts: Sequence[Draft], set_to: Speculative, sampling: Sampling, seed: int
    ) -> list[Completion]:
        """One completion of each draft, which keeps the draft's tokens as far as `speculative`
        does. All log-probs are the present policy's."""
        raise self._lacks("drafts")

    async def begin(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> Sequence[PendingGroup]:
        """As `generate`, without sampling yet."""
        raise self._lacks("partial")

    async def advance(self, works: Sequence[PendingGroup], enough: int) -> None:
        """Sample until `enough` of these groups are done, earlier ones included; then interrupt the
        others, which keep their tokens and may continue under other weights.

        Raises:
            ChildFailed: as `generate`; the tokens made so far are kept.
        """
        raise self._lacks("partial")

    async def collect(self, works: Sequence[PendingGroup]) -> list[tuple[Completion, ...]]:
        """The completions of groups that are done, in their order."""
        raise self._lacks("partial")

    def _lacks(self, capability: str) -> LocalProtocolError:
        return LocalProtocolError(f"the engine {self.maker.engine} has no {capability}")


@dataclass(slots=True)
class Serving:
    """The policy that a rollout worker generates with."""

    engine: Engine
    tokenizer: str  # fingerprint
    version: Callable[[], int]  # of the weights that serve at the time of the call
