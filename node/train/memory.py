"""An estimate of the memory that training will take, made before it starts.

Fixed part: weights, gradients and Adam's two moments in fp32 beside the runtime; with an adapter
these are its own, and the model's weights are as they are held. Varying part: what one micro-batch
keeps for its backward pass, linear in its padded tokens but for the lean pass's bounded scores.
`scripts/bench/engines/bench_training_memory.py` measures a real model against it."""

from bisect import bisect_right
from dataclasses import dataclass, replace

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from node.interfaces.adapter_files import AdapterShape, Held
from node.interfaces.trainer_spec import Recomputing, TrainerSpec
from node.methods.chunks import LOGITS_MAX
from node.policies import frozen, lean
from node.policies.model_files import check_files
from node.policies.policy import check_kind, load_error_line, pick_device
from node.system.machine import free_memory_bytes
from node.train.precision import FULL, Chosen, choose
from node.train.ranks import Ranks
from swarm.errors import ConfigError

RUNTIME_BYTES = 450 * 2**20  # interpreter, torch and transformers, without a model
MICRO_BATCH_TOKENS_MIN = 256
# Where none are set. On a CPU more are slower, and another process may want the memory.
MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 4_096}
ROW_TOKENS_WANTED = 2048  # that a trainer shall hold at once without computing layers twice
_FLOAT, _HALF = 4, 2  # bytes
_PER_HIDDEN, _PER_INTERMEDIATE = 13, 4  # numbers of a token that a layer keeps for its gradient
_NORMED = 6  # of those per hidden size, which autocast leaves in fp32: norms and what is added up
_SCORES = 2.5  # layers' worth of the lean pass's scores, beside those that each layer keeps
_RECOMPUTED = 1  # layers' worth of activations during recomputation, which runs one layer at a time
_END_GRADIENTS = 2  # of the head's size, beside all others
_LOGITS = 4  # chunks of them, with their gradient
_HEAD_GRADIENTS = 4
_COPIES = 4  # weights, gradients, two moments
_FROZEN = 1  # weights alone
_MERGED = 1  # weights, while an adapter is written merged into them
_GATHERED = 1  # weights, while rank 0 of several samples or writes
_USABLE = 0.9  # of what is free: the rest is for everybody else


@dataclass(frozen=True, slots=True)
class ModelShape:
    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    adapter_parameters: int = 0  # of an adapter that is trained in place of the model
    spared_bytes: int = 0  # of the weights under it, for they are held in less than fp32
    number_bytes: int = _FLOAT  # of what layers compute in
    kept_copies: int = 0  # of what is trained, see `node.train.kept_weights`
    is_lean: bool = False  # short texts take the lean pass, which holds its scores in full


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that training will take at `micro_batch_tokens`."""

    micro_batch_tokens: int
    row_tokens_max: int  # padded tokens of the largest single row that fits
    estimate_bytes: int
    available_bytes: int
    held_bytes: int  # of the estimate, also between updates
    recomputes: bool = False  # layers run twice, and keep their inputs alone
    computes_in: Chosen = FULL


def plan(spec: TrainerSpec, ranks: Ranks | None = None) -> MemoryPlan:
    """The largest micro-batch up to the wanted one that fits, from the configuration alone. With
    `ranks` the states are cut over them, and on the CPU they share a machine's memory.

    Raises:
        ConfigError: the model cannot be read, or does not fit at the smallest micro-batch.
    """
    device = pick_device(spec.device)
    available = spec.memory_bytes_max
    if available is None:
        available = int(free_bytes(device) * _USABLE)
        available -= int(spec.gpu_share_left * total_bytes(device))
        if ranks is not None and device.type == "cpu":
            available //= ranks.local_size
    copies = copies_of(spec)
    if ranks is not None:
        copies = copies / ranks.size + _GATHERED
    mode = spec.activation_checkpointing
    if ranks is not None and mode == "on":
        raise ConfigError("activation_checkpointing = 'on': not yet for a trainer of several ranks")
    shape = _shape(spec, ranks, device)
    found = fit(
        shape,
        spec.micro_batch_tokens or MICRO_BATCH_TOKENS.get(device.type, MICRO_BATCH_TOKENS["cpu"]),
        available,
        spec.model,
        copies,
        "off" if ranks is not None else mode,
    )
    return replace(found, computes_in=_chosen(spec, ranks, device, shape))


def usual_bytes(spec: TrainerSpec, found: MemoryPlan, tokens: int) -> int:
    """Peak bytes of a trainer alone whose updates have so many tokens, by its plan."""
    shape = _shape(spec, None, pick_device(spec.device))
    micro_batch = min(tokens, found.micro_batch_tokens)
    return estimate_bytes(shape, micro_batch, copies_of(spec), recomputes=found.recomputes)


def _shape(spec: TrainerSpec, ranks: Ranks | None, device: torch.device) -> ModelShape:
    held: Held = "float32"
    if spec.adapter is not None:
        held = _held(spec, ranks)
        frozen.check(held, device)
    if ranks is not None and spec.preference:
        raise ConfigError(f"preference = {spec.preference}: not for a trainer of several ranks")
    if ranks is not None and spec.kept_copies:
        named = "kl_weight" if spec.kl_weight else f"loss = {spec.loss}"
        raise ConfigError(f"{named}: a trainer of several ranks keeps no other weights")
    shape = replace(shape_of(spec.model, spec.adapter, held), kept_copies=spec.kept_copies)
    is_lean = shape.is_lean and ranks is None and device.type == "cpu"
    shape = replace(shape, is_lean=is_lean)
    if _chosen(spec, ranks, device, shape).precision == "bfloat16":
        return replace(shape, number_bytes=_HALF)
    return shape


def _chosen(
    spec: TrainerSpec, ranks: Ranks | None, device: torch.device, shape: ModelShape
) -> Chosen:
    if ranks is not None and device.type == "cpu":
        return FULL
    return choose(spec, device.type, shape.parameters, shape.hidden, shape.intermediate)


def _held(spec: TrainerSpec, ranks: Ranks | None) -> Held:
    if ranks is None:
        return spec.held
    if spec.lora_base == "4bit":
        raise ConfigError(
            "lora_base = '4bit': a trainer of several ranks holds the base in float32: set that"
        )
    return "float32"


def copies_of(spec: TrainerSpec) -> float:
    """Fp32 numbers held for each of the model's parameters."""
    return _COPIES if spec.adapter is None else _FROZEN + _MERGED * spec.writes_merged


def fit(
    shape: ModelShape,
    wanted_tokens: int,
    available_bytes: int,
    name: str,
    copies: float = _COPIES,
    recomputing: Recomputing = "off",
) -> MemoryPlan:
    """Halve the micro-batch until the estimate fits. With "auto" layers are computed twice where
    less than `ROW_TOKENS_WANTED` would fit otherwise.

    Raises:
        ConfigError: it does not fit at `MICRO_BATCH_TOKENS_MIN`.
    """
    recomputes = recomputing == "on"
    wanted_row = min(wanted_tokens, ROW_TOKENS_WANTED)
    if recomputing == "auto":
        recomputes = estimate_bytes(shape, wanted_row, copies) > available_bytes
    tokens = wanted_tokens
    while (
        estimate_bytes(shape, tokens, copies, recomputes=recomputes) > available_bytes
        and tokens > MICRO_BATCH_TOKENS_MIN
    ):
        tokens = max(tokens // 2, MICRO_BATCH_TOKENS_MIN)
    estimate = estimate_bytes(shape, tokens, copies, recomputes=recomputes)
    if estimate > available_bytes:
        raise ConfigError(
            f"model {name}: training needs about {_mib(estimate)} of memory and "
            f"{_mib(available_bytes)} are free: take a smaller model or free memory"
        )
    held = estimate_bytes(shape, 0, copies, recomputes=recomputes)
    most = range(1, available_bytes // _token_bytes(shape, recomputes) + 2)
    room = bisect_right(
        most,
        available_bytes,
        key=lambda row: estimate_bytes(shape, row, copies, recomputes=recomputes),
    )
    return MemoryPlan(tokens, room, estimate, available_bytes, held, recomputes)


def estimate_bytes(
    shape: ModelShape,
    micro_batch_tokens: int,
    copies: float = _COPIES,
    *,
    recomputes: bool = False,
    is_one_row: bool = False,
) -> int:
    """Peak bytes of a training process with `copies` numbers for each parameter; without tokens,
    the bytes between updates. `recomputes`: layers keep their input alone, and one at a time has
    all of its own. `is_one_row`: the tokens are a single row."""
    base = RUNTIME_BYTES + _rounded_bytes(shape, recomputes)
    if not micro_batch_tokens:
        return base + _state_bytes(shape, copies)
    forward = _before_tokens(shape, copies, micro_batch_tokens)
    forward += _token_bytes(shape, recomputes) * micro_batch_tokens
    if not recomputes:
        forward += _score_bytes(shape, micro_batch_tokens, is_one_row)
    return base + max(forward, _at_the_end(shape, copies, micro_batch_tokens, recomputes))


def _at_the_end(shape: ModelShape, copies: float, tokens: int, recomputes: bool) -> int:
    """Bytes when the backward pass ends or the step is made, with all gradients."""
    held = _state_bytes(shape, copies)
    if not shape.adapter_parameters:
        held += _FLOAT * _END_GRADIENTS * shape.vocabulary * shape.hidden
    if recomputes:  # a layer runs again, and its gradients are computed
        held += _RECOMPUTED * _layer_bytes(shape) * tokens
    return held


def _state_bytes(shape: ModelShape, copies: float) -> int:
    numbers = copies * shape.parameters + _COPIES * shape.adapter_parameters
    numbers += shape.kept_copies * (shape.adapter_parameters or shape.parameters)
    return int(_FLOAT * numbers) - shape.spared_bytes


def _rounded_bytes(shape: ModelShape, recomputes: bool) -> int:
    """Of the weights that linear layers compute with in bf16; those of layers that run twice are
    made for each run."""
    if shape.number_bytes != _HALF or shape.adapter_parameters or recomputes:
        return 0
    return _HALF * shape.parameters


def _before_tokens(shape: ModelShape, copies: float, tokens: int) -> int:
    """Bytes beside a micro-batch at the peak, where its backward pass begins: of a whole model only
    the head's gradients exist."""
    gradients = _FLOAT * shape.parameters if copies == _COPIES else 0
    return _state_bytes(shape, copies) - gradients + _head_bytes(shape, tokens)


def _score_bytes(shape: ModelShape, tokens: int, is_one_row: bool) -> int:
    """Of the lean pass, which a single row of too many tokens does not take."""
    scores = shape.layers * shape.heads * tokens**2
    if not shape.is_lean or (is_one_row and scores > lean.SCORES_MAX):
        return 0
    return int(_FLOAT * min(scores, lean.SCORES_MAX) * (1 + _SCORES / shape.layers))


def _head_bytes(shape: ModelShape, tokens: int) -> int:
    """A chunk's logits and the gradients of the head's weights; under a frozen head in bf16, a part
    of it in fp32."""
    chunk = min(max(LOGITS_MAX, shape.vocabulary), tokens * shape.vocabulary)
    head = shape.vocabulary * shape.hidden
    if not shape.adapter_parameters:
        return _FLOAT * (_LOGITS * chunk + _HEAD_GRADIENTS * head)
    largest = max(head, shape.hidden * shape.intermediate)
    room = min(largest, frozen.ROOM_NUMBERS) if shape.spared_bytes else 0
    return _FLOAT * (_LOGITS * chunk + room)


def _token_bytes(shape: ModelShape, recomputes: bool) -> int:
    return shape.layers * (_FLOAT * shape.hidden if recomputes else _layer_bytes(shape))


def _layer_bytes(shape: ModelShape) -> int:
    """Bytes that a layer keeps of a token for its gradient."""
    in_fp32 = _NORMED * shape.hidden
    numbers = _PER_HIDDEN * shape.hidden + _PER_INTERMEDIATE * shape.intermediate + 8 * shape.heads
    return _FLOAT * in_fp32 + shape.number_bytes * (numbers - in_fp32)


def shape_of(model: str, adapter: AdapterShape | None = None, held: Held = "float32") -> ModelShape:
    """Read a model's shape without its weights, which are `held` so under an adapter.

    Raises:
        ConfigError: the configuration cannot be read, or the model takes no such adapter.
    """
    check_files(model)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        check_kind(config, model)
        network = without_weights(config)
    except ConfigError:
        raise
    except Exception as error:  # boundary: as in `load_policy`
        raise ConfigError(load_error_line(model, error)) from error
    return shape_of_network(network, model, adapter, held)


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The network of a configuration; its parameters have shapes alone."""
    with torch.device("meta"):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return network


def shape_of_network(
    network: PreTrainedModel,
    model: str,
    adapter: AdapterShape | None = None,
    held: Held = "float32",
) -> ModelShape:
    """As `shape_of`, by a network with or without weights."""
    trained, spared = 0, 0.0
    if adapter is not None:
        from node.policies import adapters  # brings PEFT in

        trained = adapters.parameters(network, adapter, model)
        if held != "float32":
            spared = (_FLOAT - _HALF) * frozen.numbers(network)
        if held == "4bit":
            spared += (_HALF - frozen.FOUR_BITS_BYTES) * adapters.covered(network, adapter, model)
    text = network.config.get_text_config()
    hidden = int(text.hidden_size)

    def largest(name: str) -> int:
        return max(int(getattr(layer, name, None) or 0) for layer in lean.layers_of(text))

    parameters = sum(p.numel() for p in network.parameters())
    return ModelShape(
        parameters=parameters,
        layers=int(text.num_hidden_layers),
        hidden=hidden,
        intermediate=largest("intermediate_size") or 4 * hidden,
        heads=largest("num_attention_heads") or 1,
        vocabulary=int(text.vocab_size),
        adapter_parameters=trained,
        spared_bytes=int(spared),
        is_lean=lean.knows(network) and lean.trains(parameters, trained),
    )


def free_bytes(device: torch.device) -> int:
    """Memory that training may take: of the GPU, or of the machine within our control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


def total_bytes(device: torch.device) -> int:
    """Of a GPU; 0 for the CPU, whose memory is everybody's."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
