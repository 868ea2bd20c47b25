"""What a trainer is built from. Free of torch, so that the node's own process can hold it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from swarm.errors import ConfigError

Aggregation = Literal["token_mean", "sequence_mean"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """All that decides what a trainer computes; validated on construction.

    `model` is a local Hugging Face model directory or a hub id (the `tiny` preset is such a
    directory, made by `node.training.tiny`).
    """

    model: str
    learning_rate: float = 2e-4  # for the tiny preset; 1e-6 to 1e-5 suits models from the hub
    updates_per_batch: int = 1
    aggregation: Aggregation = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    grad_norm_max: float = 1.0
    micro_batch_tokens: int = 8192  # padded tokens in one forward pass; halved until it fits
    memory_bytes_max: int | None = None  # None: what the machine has left at the start
    context_tokens_max: int = 4096  # cap on what the model's own configuration allows
    completion_tokens_max: int | None = None  # of foreign completions, EOS aside; None: context
    foreign_logprob_min: float | None = None  # of foreign tokens to train on; None: all of them
    seed: int = 0
    threads: int = 0  # 0: one less than the cores, at least 1, at most `THREADS_MAX`
    device: Device = "auto"

    def __post_init__(self) -> None:
        checks = (
            ("model", bool(self.model), "name a preset, a model directory or a hub id"),
            ("learning_rate", 0 < self.learning_rate <= 1, "take 0 < learning_rate <= 1"),
            ("updates_per_batch", 1 <= self.updates_per_batch <= 64, "take 1 to 64"),
            ("aggregation", self.aggregation in get_args(Aggregation), "token_mean, sequence_mean"),
            ("clip_low", 0 < self.clip_low < 1, "take 0 < clip_low < 1"),
            ("clip_high", self.clip_high > 0, "take clip_high > 0"),
            ("grad_norm_max", self.grad_norm_max > 0, "take grad_norm_max > 0"),
            ("micro_batch_tokens", self.micro_batch_tokens >= 64, "take at least 64"),
            ("context_tokens_max", self.context_tokens_max >= 8, "take at least 8"),
            (
                "completion_tokens_max",
                self.completion_tokens_max is None or self.completion_tokens_max >= 1,
                "take at least 1",
            ),
            (
                "foreign_logprob_min",
                self.foreign_logprob_min is None or self.foreign_logprob_min < 0,
                "take a natural log-prob below 0",
            ),
            ("threads", 0 <= self.threads <= THREADS_MAX, f"take 0 to {THREADS_MAX}"),
            ("device", self.device in get_args(Device), "auto, cpu or cuda"),
        )
        for field, good, hint in checks:
            if not good:
                raise ConfigError(f"trainer {field} = {getattr(self, field)!r}: {hint}")

    def to_record(self) -> dict[str, Any]:
        """Plain values, for the pipe to the child process."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "TrainerSpec":
        return cls(**record)


THREADS_MAX = 64
