"""What is asked of a vLLM engine: completions in the making, how many of them have to be done, and
what it cannot do."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from node.engines.vllm import probe
from node.engines.vllm.unfinished import Unfinished
from node.interfaces.engine import Sampling
from swarm.errors import ConfigError

TEMPERATURE_MAX: Final = 2.0  # vLLM's own


@dataclass(eq=False, slots=True)
class VllmWork:
    """See `Work`."""

    rows: Unfinished
    completions: int
    sampling: Sampling
    prompt: str = ""

    @property
    def done(self) -> bool:
        """See `Work.done`."""
        return self.rows.done


@dataclass(frozen=True, slots=True)
class Update:
    """What a load took."""

    policy_version: int
    tensors: int  # that were loaded
    tensors_total: int
    lent: bool  # they were taken from the trainer's own memory
    paused_s: float  # from when it began to interrupt to when it let sampling go on
    probe: probe.Difference | None  # from what it should be; None: nobody says


class Harvest:
    """How many works are still to be done until the others are cut off."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.full = trio.Event()

    @property
    def is_full(self) -> bool:
        return self._wanted <= 0

    def count(self, done: bool) -> None:
        self._wanted -= done
        if self._wanted == 0:
            self.full.set()


def prompt_seeds(prompts: Sequence[str], seed: int) -> list[int]:
    """A seed for each prompt that depends on the seed, the prompt and its repetition alone."""
    seen: Counter[str] = Counter()
    seeds = []
    for prompt in prompts:
        digest = hashlib.sha256(f"{seed}/{seen[prompt]}/{prompt}".encode()).digest()
        seen[prompt] += 1
        seeds.append(int.from_bytes(digest[:6], "big"))
    return seeds


def check(sampling: Sampling, completions_each: int) -> None:
    """
    Raises:
        ConfigError: vLLM samples no such thing.
    """
    if sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.max_new_tokens < 1:
        raise ConfigError(
            f"sampling {sampling}: take temperature > 0, 0 < top_p <= 1, max_new_tokens >= 1"
        )
    if sampling.temperature > TEMPERATURE_MAX:
        raise ConfigError(
            f"temperature {sampling.temperature:g}: vLLM takes at most {TEMPERATURE_MAX:g}; lower "
            "it in the run file, or use --engine torch"
        )
    if completions_each < 1:
        raise ConfigError(f"completions_each = {completions_each}: take at least 1")
