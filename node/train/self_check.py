"""Before work starts: engine and trainer compute what the bare model says of each row alone.

A few short prompts of unlike lengths are continued by the engine in one batch. Each pass that the
trainer may take then runs over all of them, padded. The longest prompt exceeds the model's window
where time and memory allow: `WORK_MAX`, `LOGITS_MAX` and a micro-batch of the trainer."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch

from node.engines.torch_engine import Generation
from node.interfaces.engine import Request, Sampling
from node.methods.losses import token_logprobs
from node.policies import lean
from node.policies.policy import Policy
from node.train.rows import Row, Unit
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from swarm.rollouts import Completion
from swarm.texts import first_line

LENGTHS: Final = (3, 11)  # of prompts, in tokens; the last is longer where there is a window
LIMITS: Final = (4, 2)  # of what follows each
EACH: Final = 2  # completions of the first prompt, which has a pass of its own for several
PAST_WINDOW: Final = 8  # tokens of the longest prompt beyond a window
PASSES: Final = 8  # over rows as long as the longest prompt, in all
WORK_MAX: Final = {"cuda": 2**48, "cpu": 2**39}  # multiplications of what exceeds a window
LOGITS_MAX: Final = 2**29  # of one pass, the same
EXACT_NATS: Final = 1e-3  # that passes in fp32 may differ by
NOISE_TIMES: Final = 6.0  # the noise of fewer bits, that passes may differ by under autocast
_WINDOWS: Final = ("sliding_window", "attention_chunk_size", "window_size", "index_topk")
T = TypeVar("T")
_OUT_OF_MEMORY: Final = ("can't allocate memory", "out of memory")


@dataclass(frozen=True, slots=True)
class Bare:
    """Each row's log-probs by the model alone, and the noise of the precision, in nats."""

    rows: list[torch.Tensor]
    noise: float

    def off(self, found: Sequence[torch.Tensor]) -> float:
        """The largest difference in nats; infinite where a number is none."""
        pairs = zip(self.rows, found, strict=True)
        far = torch.cat([(one - other.cpu()).abs() for one, other in pairs])
        return math.inf if far.isnan().any() else float(far.max())


@dataclass(frozen=True, slots=True)
class Agreement:
    """One way of computing: the nats that it is off, or the error that it failed with."""

    what: str
    nats: float
    most: float  # allowed
    error: str = ""

    @property
    def stands(self) -> bool:
        return self.nats <= self.most

    def __str__(self) -> str:
        if self.error:
            return f"{self.what} fails with {self.error}"
        return f"{self.what} is {self.nats:.2g} nats off what the model says of each text alone"


def check(trainer: GroupTrainer) -> None:
    """Refuse a model with which engine or trainer compute something else than the model alone.

    Raises:
        ConfigError: with the way that is wrong, and what to do.
    """
    wrong = next((each for each in findings(trainer) if not each.stands), None)
    if wrong is None:
        return
    policy = trainer.policy
    plain = replace(policy, forward="plain")
    helps = policy.forward != "plain" and all(each.stands for each in _found(trainer, plain))
    todo = "take --forward plain" if helps else "take another model"
    raise ConfigError(f"model {policy.name} ({type(policy.model).__name__}): {wrong}: {todo}")


def findings(trainer: GroupTrainer) -> list[Agreement]:
    """Of the engine, then of each pass that this trainer may take."""
    return _found(trainer, trainer.policy)


def _found(trainer: GroupTrainer, policy: Policy) -> list[Agreement]:
    before, trainer.policy = trainer.policy, policy
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return list(_of_all(trainer))
    finally:
        trainer.policy = before


def _of_all(trainer: GroupTrainer) -> Iterator[Agreement]:
    policy = trainer.policy
    sampled, error = _tried(lambda: list(_sampled(policy, _prompts(trainer))))
    if sampled is None:
        yield Agreement("the engine", math.inf, 0.0, error)
        return
    units = [Unit(prompt, [_row(each.token_ids) for each in made]) for prompt, made in sampled]
    bare, error = _tried(lambda: _bare(policy, units))
    if bare is None:
        yield Agreement("the model", math.inf, 0.0, error)
        return
    most = EXACT_NATS + NOISE_TIMES * bare.noise
    said = [torch.tensor(each.logprobs) for _, made in sampled for each in made]
    yield Agreement("the engine", bare.off(said), most)
    for name, forward in trainer.passes().items():
        with policy.autocast():
            nats, error = _tried(lambda: bare.off(forward(units, token_logprobs)))  # noqa: B023
        yield Agreement(
            f"the trainer's pass '{name}'", math.inf if nats is None else nats, most, error
        )


def _tried(do: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or None and the error in one line. Lack of memory is no such error."""
    try:
        return do(), ""
    except (MemoryError, ConfigError):
        raise
    except Exception as error:  # boundary: models and their caches raise many kinds
        if any(each in str(error) for each in _OUT_OF_MEMORY):
            raise
        return None, f"{type(error).__name__}: {first_line(error)}"


def _prompts(trainer: GroupTrainer) -> list[list[int]]:
    policy = trainer.policy
    room = policy.context_tokens - LIMITS[0]
    window = _window(policy)
    longest = window + PAST_WINDOW if window else LENGTHS[-1]
    embeddings = sum(each.numel() for each in policy.model.get_input_embeddings().parameters())
    work = PASSES * longest * (policy.parameters - embeddings)
    padded = (len(LENGTHS) - 1 + EACH) * longest
    if (
        longest > room
        or work > WORK_MAX[policy.device.type]
        or padded > trainer.micro_batch_tokens
        or padded * policy.vocabulary > LOGITS_MAX
    ):
        longest = LENGTHS[-1]
    text = policy.encode_completion(" ".join(map(str, range(longest))))
    return [text[: max(2, min(length, room))] for length in (*LENGTHS[:-1], longest)]


def _window(policy: Policy) -> int:
    """The length beyond which a layer does not see all of a text; 0: there is none."""
    layers = lean.layers_of(policy.model.config.get_text_config())
    found = [getattr(layer, name, None) for layer in layers for name in _WINDOWS]
    return min((each for each in found if isinstance(each, int) and each > 0), default=0)


def _sampled(
    policy: Policy, prompts: Sequence[list[int]]
) -> Iterator[tuple[list[int], tuple[Completion, ...]]]:
    """Each prompt with its completions."""
    requests = [
        Request(str(place), n=EACH if place == 0 else 1, limit=limit)
        for place, limit in enumerate(LIMITS)
    ]
    sampling = Sampling(temperature=1.0, max_new_tokens=max(LIMITS))
    generation = Generation(policy, requests, sampling, seed=0, encoded=prompts)
    while not generation.done:
        generation.advance(sampling.max_new_tokens, 0)
    yield from zip(prompts, generation.completions(), strict=True)


def _row(tokens: Sequence[int]) -> Row:
    return Row(list(tokens), 0.0, own=True, behaviour_logprobs=None)


def _bare(policy: Policy, units: Sequence[Unit]) -> Bare:
    """One forward pass for each row, and once more in fp32 where autocast computes in less."""
    with policy.autocast():
        rows, is_rounded = _alone(policy, units), torch.is_autocast_enabled(policy.device.type)
    noise = 0.0
    if is_rounded:
        exact = _alone(policy, units)
        noise = max(float((one - two).abs().max()) for one, two in zip(rows, exact, strict=True))
    return Bare(rows, noise)


def _alone(policy: Policy, units: Sequence[Unit]) -> list[torch.Tensor]:
    found = []
    for unit in units:
        for row in unit.rows:
            ids = torch.tensor([unit.prompt + row.tokens], device=policy.device)
            kept = policy.logits_kept(len(row.tokens) + 1)
            logits = policy.model(input_ids=ids, use_cache=False, **kept).logits
            last = logits[0, -len(row.tokens) - 1 : -1]
            found.append(token_logprobs(last, ids[0, -len(row.tokens) :]).float().cpu())
    return found
