"""The settings of a trainer. Free of torch, for the node's own process."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from node.interfaces.adapter_files import AdapterShape, Held
from node.interfaces.prompts import PLAIN_RULES, TemplateRules, Thinking
from node.methods.choices import chosen_correction, chosen_loss, chosen_preference
from node.methods.loss_settings import DEFAULT_LOSS, EwmaLoss, StaleLoss
from swarm.errors import ConfigError

ForeignWeighting = Literal["auto", "none", "positives"]
Device = str  # auto, cpu, cuda, or one GPU such as cuda:1
Precision = Literal["float32", "bfloat16"]
WantedPrecision = Literal["auto", "float32", "bfloat16"]
# By device: bf16 on a GPU, else fp32, in which a scorer finds what bf16 would hide
TrainerPrecision = WantedPrecision | Literal["by_device"]
Recomputing = Literal["auto", "on", "off"]
Forward = Literal["auto", "plain"]
THREADS_MAX = 64
CONTEXT_TOKENS_MIN = 8
_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "loss": chosen_loss,
    "correction": chosen_correction,
    "preference": chosen_preference,
}


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Settings of a trainer, within the bounds of `NodeConfig`. `model`: a directory or a hub
    id."""

    model: str
    learning_rate: float | None = None  # None: what suits the policy (`node.train.default_rate`)
    warm_up_updates: int | None = None  # in which the rate rises to full; None: what suits it
    updates_per_batch: int = 1
    correction: str = ""  # as the loss; empty: foreign tokens count by their weight, up to twice
    loss: str = DEFAULT_LOSS  # and what it is set to, as `node.methods.choices.chosen` reads it
    preference: str = ""  # updates on pairs, as the loss; empty: there are none
    teacher_weight: float = 0.0  # of a teacher's log-probs in token advantages
    kl_weight: float = 0.0  # of own tokens' divergence from a reference policy; 0: there is none
    kl_reset_every: int = 0  # updates until the reference becomes the present policy; 0: never
    grad_norm_max: float = 1.0
    clips_to_median: bool = True  # gradients, to three times the running median of their norms
    step_guard: bool = True  # takes a step back that moves the policy far more than others did
    micro_batch_tokens: int | None = None  # padded, in one forward pass; None: by the device
    activation_checkpointing: Recomputing = "auto"  # layers run twice; auto: where it must be
    forward: Forward = "auto"  # plain: rows run whole, without the keys and values of others
    memory_bytes_max: int | None = None  # None: what the machine has left at the start
    gpu_share_left: float = 0.0  # of its GPU's memory, for an engine that is not there yet
    context_tokens_max: int | None = None  # None: the model's own limit, at most some 32,768
    completion_tokens_max: int | None = None  # of what the run samples, EOS aside; None: context
    completion_chars_max: int | None = None  # of foreign completions; None: any
    temperature: float = 1.0  # that the run samples at; losses are of that distribution
    template_rules: TemplateRules = PLAIN_RULES
    thinking: Thinking | None = None
    foreign_weighting: ForeignWeighting = "auto"  # see `node.train.rows`
    foreign_logprob_min: float | None = None  # of foreign tokens to train on; None: all of them
    lora_rank: int = 0  # of the adapter that is trained in place of the model; 0: none
    lora_alpha: float | None = None  # the adapter is scaled by alpha / rank; None: twice the rank
    lora_targets: tuple[str, ...] = ()  # layers with one, by name; none named: attention and MLP
    lora_base: Held | None = None  # the frozen weights; None: bf16, or as a loaded adapter has it
    writes_merged: bool = False  # an engine gets the adapter merged into the model
    precision: TrainerPrecision = "auto"  # to compute in; auto: by `node.train.precision`
    generates_in: Precision = "float32"  # the policy that generates, where that is another copy
    seed: int = 0
    threads: int = 0  # 0: one less than the cores, at least 1, at most `THREADS_MAX`
    device: Device = "auto"

    def __post_init__(self) -> None:
        for name, read in _READ.items():
            value = getattr(self, name)
            try:
                read(value or None)
            except ValueError as error:
                raise ConfigError(f"trainer {name} = {value!r}: {error}") from None
        if not self.correction:
            return
        loss = chosen_loss(self.loss)
        if isinstance(loss, StaleLoss):
            raise ConfigError(
                f"correction {self.correction}: is for the loss sapo, and {loss.kind} has its own"
            )

    @property
    def adapter(self) -> AdapterShape | None:
        """The adapter to train; None: the model itself is trained. Without targets: all."""
        if self.lora_rank == 0:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return AdapterShape(self.lora_rank, alpha, tuple(sorted(set(self.lora_targets))))

    @property
    def kept_copies(self) -> int:
        """The sets of the trained weights that are kept beside the present one."""
        loss = chosen_loss(self.loss)
        versions = loss.snapshots if isinstance(loss, StaleLoss) else 0
        return versions + isinstance(loss, EwmaLoss) + (self.kl_weight > 0)

    @property
    def held(self) -> Held:
        """The precision of the frozen weights under an adapter."""
        return self.lora_base or "bfloat16"

    def to_record(self) -> dict[str, Any]:
        """Plain values, for the pipe to the child process."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "TrainerSpec":
        thinking = record["thinking"]
        read = {
            "lora_targets": tuple(record["lora_targets"]),
            "template_rules": TemplateRules(**record["template_rules"]),
            "thinking": None if thinking is None else Thinking(**thinking),
        }
        return cls(**record | read)
