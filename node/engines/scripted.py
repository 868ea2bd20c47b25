"""An engine and a trainer without a model, for simulations and tests.

The engine answers the `scripted_sum` environment with a given skill, which each informative group
raises. Both take the given time on the loop's clock.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import trio

from node.interfaces.engine import Engine, EngineInfo, Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import PolicyInfo, TrainingGroup, TrainReport
from node.interfaces.trainer_spec import Precision
from swarm.errors import ChildFailed
from swarm.rollouts import Completion, FinishReason

SKILL_MAX = 0.95
SKILL_STEP = 0.005  # gained with each informative group
TOKENIZER = "scripted-bytes"


class ScriptedPolicy(Engine):
    maker = EngineInfo("scripted")

    def __init__(
        self, *, skill: float = 0.4, generate_s: float = 1.0, train_s: float = 1.0
    ) -> None:
        self.skill = skill
        self.version = 0
        self.rate_share = 1.0
        self.trained: list[TrainingGroup] = []  # of the last batch
        self._generate_s = generate_s
        self._train_s = train_s

    async def info(self) -> PolicyInfo:
        return PolicyInfo("scripted", 0, TOKENIZER, self.version, 4096, clipping_active=False)

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        """A prompt is "a+b="; a wrong answer is off by one, and a hint that begins the answer is
        continued. Everything is sampled after the wait, with the version of that moment."""
        await trio.sleep(self._generate_s)
        rng = Random(seed)
        return [
            tuple(self._complete(prompt, sampling, rng) for _ in range(completions_each))
            for prompt in prompts
        ]

    def _complete(self, prompt: str, sampling: Sampling, rng: Random) -> Completion:
        said = Prompt.read(prompt)
        left, right = said.question.removesuffix("=").split("+")
        wrong = rng.random() >= self.skill
        answer = str(int(left) + int(right) + wrong).removeprefix(said.beginning)
        tokens = tuple(answer.encode())[: sampling.max_new_tokens]
        return Completion(
            text=bytes(tokens).decode(),
            token_ids=tokens,
            logprobs=tuple(-rng.random() for _ in tokens),
            finish_reason=FinishReason.STOP,
            policy_version=self.version,
        )

    async def load(self, weights: Path, policy_version: int) -> None:
        """Read the skill from the file's text."""
        try:
            skill = float(await trio.to_thread.run_sync((weights / "skill").read_text))
        except (OSError, ValueError) as error:
            raise ChildFailed(f"weights {weights}: {error}") from error
        self.skill, self.version = skill, policy_version

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        await trio.sleep(self._train_s)
        self.trained = list(groups)
        useful = sum(any(group.advantages) for group in groups)
        self.skill = min(SKILL_MAX, self.skill + self.rate_share * SKILL_STEP * useful)
        self.version += 1
        return TrainReport(
            policy_version=self.version,
            loss=-self.skill,
            grad_norm=float(useful),
            trained_tokens=sum(len(c.text) for group in groups for c in group.completions),
            clip_fraction=0.0,
            own_logprob=-0.5,
            foreign_logprob=-0.5 if any(not g.own_tokens for g in groups) else float("nan"),
            skipped_completions=0,
            seconds=self._train_s,
        )

    async def prompt_logprobs(self, prompts: Sequence[str]) -> list[tuple[list[str], list[float]]]:
        await trio.lowlevel.checkpoint()
        return [([], [])] * len(prompts)

    async def features(self, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]]:
        await trio.lowlevel.checkpoint()
        return [[(self.skill, float(len(c.text))) for c in group.completions] for group in groups]

    async def save(self, directory: Path) -> None:
        await self.export(directory)

    async def roll_back(self, directory: Path) -> int:
        await self.load(directory, self.version + 1)
        return self.version

    async def slow_down(self, rate_share: float) -> None:
        await trio.lowlevel.checkpoint()
        self.rate_share = rate_share

    async def export(self, directory: Path, precision: Precision = "float32") -> None:
        await trio.to_thread.run_sync((directory / "skill").write_text, str(self.skill))

    async def export_whole(self, directory: Path, precision: Precision = "float32") -> None:
        await self.export(directory)

    async def memory_bytes(self) -> int:
        return 0
