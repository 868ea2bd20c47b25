"""The policy: a Hugging Face causal LM with its tokenizer, loaded or refused in one line.

Trained weights are in fp32. They may compute in bf16, under autocast and with linear layers rounded
as in published versions. Frozen weights under an adapter may be held in fewer bits: see
`node.policies.frozen`."""

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from node.interfaces.adapter_files import AdapterShape, Held
from node.interfaces.contexts import context_in
from node.interfaces.prompts import (
    NO_TEXT,
    PLAIN_RULES,
    AddedToken,
    PromptEncoder,
    TemplateRules,
    Thinking,
)
from node.interfaces.trainer_spec import Device, Forward, Precision
from node.policies import frozen
from node.policies import tensor_files as tensors
from node.policies import tokenizer_files as tokenizers
from node.policies.chat_templates import Renderer
from node.policies.exported_files import files_of
from node.policies.model_files import NEEDED, check_files
from node.policies.rounding import RoundedWeights
from node.policies.weight_diff import kinds_of
from swarm.errors import ChildFailed, ConfigError
from swarm.storage import shared_files
from swarm.texts import first_line
from swarm.weights.delta import AUTO_MAP

transformers_logging.disable_progress_bar()  # ours tell more, and a log file is no terminal

CONTEXT_TOKENS_MAX = 32_768  # unless the node is set to another limit; models name ever more
_CONTEXT_DEFAULT = 2048  # tokens, for a configuration that names no limit
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_REASON_CHARS = 200
_PARTS = frozenset({"text_config", "vision_config", "audio_config"})  # of models of several inputs
_CAUSAL_TOLERANCE = 1e-3  # share of the largest logit; an order of summing costs 1e-5


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter that is trained in place of the whole policy; see `node.policies.adapters`."""

    shape: AdapterShape
    base: str  # hash of the frozen weights, as their files have them
    held: Held = "float32"  # what they are in here


@dataclass(slots=True)
class Policy(PromptEncoder):
    """A model ready to sample from and to train. Weights change in place."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    context_tokens: int
    eos_ids: frozenset[int]  # any of them ends a completion
    eos_id: int  # ends what the model says by itself
    device: torch.device
    adapter: Adapter | None = None
    forward: Forward = "auto"
    computes_in: Precision = "float32"
    rounded: RoundedWeights | None = field(default=None, repr=False, compare=False)
    template_rules: TemplateRules = PLAIN_RULES
    thinking: Thinking | None = None
    renderer: Renderer | None = field(default=None, repr=False, compare=False)  # from the first on
    control: tuple[object, Mapping[int, AddedToken]] | None = field(
        default=None, repr=False, compare=False
    )
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # for exports; none: new

    @property
    def precision(self) -> str:
        """The precision of its computation, or the quantisation of its weights."""
        if self.adapter is not None and self.adapter.held == "4bit":
            return "nf4"
        return self.computes_in

    @property
    def is_narrow(self) -> bool:
        """True if weights are held in fewer bits than they are computed with."""
        return self.adapter is not None and self.adapter.held != "float32"

    @property
    def parameters(self) -> int:
        return sum(frozen.numel(p) for p in self.model.parameters())

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        return embeddings.num_embeddings

    @property
    def stateful(self) -> bool:
        """True if it keeps more than keys and values of tokens: padding must not enter it."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        return bool(getattr(self.model, "_is_stateful", False)) or not _ATTENTION.issuperset(kinds)

    @property
    def plain(self) -> bool:
        """True if rows run whole, without cache, and in the engine with none of other lengths."""
        return self.stateful or self.forward == "plain"

    def logits_kept(self, last: int) -> dict[str, int]:
        """Arguments of a forward pass for logits of the last positions alone; none where the model
        cannot."""
        known = inspect.signature(self.model.forward).parameters
        return {"logits_to_keep": last} if "logits_to_keep" in known else {}

    @property
    def chat_template(self) -> str | None:
        template: str | dict[str, str] | None = self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def added_tokens(self) -> Mapping[int, AddedToken]:
        return self.tokenizer.added_tokens_decoder

    def encode_split(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False, split_special_tokens=True)

    def encode_special(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False, split_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        return self._ids(text, split_special_tokens=True)

    def _ids(self, text: str, **how: bool) -> list[int]:
        return list(self.tokenizer(text, **how)["input_ids"])

    def template_renderer(self) -> Renderer:
        template = self.chat_template
        assert template is not None
        if self.renderer is None or self.renderer.template != template:
            named: Mapping[str, Any] = self.tokenizer.special_tokens_map
            constants = {
                name: list(map(str, text)) if isinstance(text, list) else str(text)
                for name, text in named.items()
            }
            self.renderer = Renderer(self.name, template, constants, self.template_rules)
        return self.renderer

    def decode(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        if ids and ids[-1] in self.eos_ids:
            del ids[-1]
        text = str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # ids may exceed the number of tokens: some vocabularies have gaps
            return text + NO_TEXT * sum(backend.id_to_token(each) is None for each in ids)
        known = len(self.tokenizer)  # slow to ask
        return text + NO_TEXT * sum(each >= known for each in ids)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Within it the policy computes in its precision."""
        if self.computes_in == "float32":
            yield
            return
        with torch.autocast(self.device.type, dtype=torch.bfloat16), self.with_rounded():
            yield

    @contextmanager
    def with_rounded(self) -> Iterator[None]:
        """Within it linear layers have the weights that `autocast` computes with."""
        if self.rounded is None or self.adapter is not None:  # under one nearly all is frozen
            yield
            return
        with self.rounded.loaded():
            yield

    def compute_in(self, precision: Precision, *, keeps: bool = True) -> None:
        """Set the precision. In bf16 linear layers have rounded weights beside the fp32 ones:
        in memory if `keeps`, else while each layer runs."""
        self.computes_in, self.rounded = precision, None
        if precision == "bfloat16":
            self.rounded = RoundedWeights(self.model, keeps=keeps)

    def load_weights(self, directory: Path) -> None:
        """Load the weights of a model directory with the same names and shapes, or change nothing.

        Raises:
            ConfigError: missing or unreadable files, other names or other shapes.
        """
        target = dict(self.model.state_dict())
        if not (files := sorted(directory.glob("*.safetensors"))):
            raise ConfigError(f"{directory}: no safetensors file in it")
        source: dict[str, torch.Tensor] = {}
        for file in files:
            source |= tensors.read(file, str(directory))
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing = sorted(target.keys() - source.keys() - tied)
        if missing:
            raise ConfigError(f"{directory}: weights lack {missing[0]}; export them again")
        unknown = sorted(source.keys() - target.keys())
        if unknown:
            raise ConfigError(f"{directory}: {unknown[0]} is none of this model's weights")
        if name := tensors.not_finite(source):
            raise ConfigError(f"{directory}: {name} holds numbers that are not finite")
        for name, value in source.items():
            if target[name].shape != value.shape:
                raise ConfigError(f"{directory}: {name} has shape {tuple(value.shape)}")
        with torch.no_grad():
            for name, value in source.items():
                target[name].copy_(value)


def load_policy(
    model: str,
    device: Device = "auto",
    context_tokens_max: int | None = None,
    *,
    narrow: bool = False,
    template_rules: TemplateRules = PLAIN_RULES,
    thinking: Thinking | None = None,
) -> Policy:
    """Load a model directory or hub id in fp32. `context_tokens_max` None: the model's own limit,
    `CONTEXT_TOKENS_MAX` at most. `narrow`: in bf16 where its files hold nothing else; it computes
    only after `frozen.hold`. `template_rules`, `thinking`: the run's.

    Raises:
        ConfigError: no such model, offline without a copy of it, or files that do not load.
    """
    place = pick_device(device)
    check_files(model)
    network, tokenizer = _read(model, narrow=narrow)
    move(network, place)
    policy = Policy(
        name=Path(model).name if Path(model).is_dir() else model,
        model=network,
        tokenizer=tokenizer,
        fingerprint=tokenizer_fingerprint(tokenizer),
        context_tokens=min(
            context_in(network.config.get_text_config().to_dict()) or _CONTEXT_DEFAULT,
            context_tokens_max or CONTEXT_TOKENS_MAX,
        ),
        eos_ids=frozenset(),
        eos_id=-1,
        device=place,
        template_rules=template_rules,
        thinking=thinking,
        files=files_of(_directory(model)),
    )
    policy.compute_in("bfloat16" if place.type == "cuda" else "float32")
    _give_ends(policy)
    question = policy.encode_prompt("1 + 1 = ?")
    tokenizers.check_covered(model, tokenizer, policy.vocabulary, [*policy.eos_ids, *question])
    return policy


def _give_ends(policy: Policy) -> None:
    """Set the tokens that end its completions, by all of its files."""
    network = policy.model
    told = (policy.tokenizer, network.generation_config, network.config,
            network.config.get_text_config())  # fmt: skip
    ids, last = policy.find_ends(getattr(each, "eos_token_id", None) for each in told)
    if last is None:
        raise ConfigError(f"model {policy.name}: its tokenizer names no end-of-sequence token")
    policy.eos_ids, policy.eos_id = ids, last


def _read(model: str, *, narrow: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Network and tokenizer of a model; ConfigError as `load_policy`."""
    try:
        with shared_files():  # it may come into a cache that users share
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            check_kind(config, model)
            tokenizer = load_tokenizer(model)
            network = _load(model, narrow=narrow)
        network.eval()  # no dropout anywhere: sampling and training see one distribution
        if not narrow:  # which computes only later
            _refuse_encoder(network, model)
    except ConfigError:
        raise
    except Exception as error:  # boundary: files may make a class of transformers raise anything
        raise ConfigError(load_error_line(model, error)) from error
    return network, tokenizer


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer: its `tokenizer.json` as it is, else what transformers makes of others.
    Classes that a configuration names replace steps of the file by their own, and some lose blanks.

    Raises:
        ConfigError: the file cannot be used, or text does not come back. Others: transformers'.
    """
    found = cached_file(
        model,
        FULL_TOKENIZER_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    tokenizer: PreTrainedTokenizerBase
    if found:
        tokenizers.check(model, Path(found))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizers.check_text(model, tokenizer)
    return tokenizer


def _load(model: str, *, narrow: bool) -> PreTrainedModel:
    if narrow and _kinds(model) == {"BF16"}:
        network = tensors.load(model, torch.bfloat16)
        if all(buffer.dtype != torch.bfloat16 for buffer in network.buffers()):
            return network  # else it computed in bf16 what is to be in fp32, such as a scale
    return tensors.load(model, torch.float32)


def _kinds(model: str) -> set[str]:
    """Number types in a model's files; none where its weights are still to be downloaded."""
    try:
        return {kind for kind, _ in kinds_of(_directory(model)).values()}
    except ChildFailed:
        return set()


def _directory(model: str) -> Path:
    """The directory with a model's configuration, in the cache if it came from a hub."""
    config = cached_file(model, CONFIG_NAME)
    return Path(config).parent if config else Path(model)


def move(model: torch.nn.Module, device: torch.device) -> None:
    """In place. `PreTrainedModel.to` is decorated and has lost its arguments' types."""
    model.to(device)


def check_kind(config: PreTrainedConfig, model: str) -> None:
    """Raise ConfigError for quantised weights, which take no update, and for models that are more
    than a decoder of text. Of some others transformers has a class for the text alone."""
    told = getattr(config, "quantization_config", None)
    if told:
        method = told.get("quant_method", "") if isinstance(told, dict) else ""
        raise ConfigError(
            f"model {model}: its weights are quantised{f' ({method})' if method else ''}, and can "
            "neither be trained nor take new versions: name the model that it was made from"
        )
    if config.is_encoder_decoder:
        raise ConfigError(
            f"model {model}: {config.model_type} reads prompts with an encoder of their own; only "
            "models that are one decoder can be trained"
        )
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    takes = getattr(made, "input_modalities", "text")
    is_whole = made is not None and made.config_class is type(config)
    if is_whole and takes != "text" and _PARTS.intersection(config.sub_configs):
        raise ConfigError(
            f"model {model}: {made.__name__} takes {', '.join(takes)}; only models of text can be "
            "trained"
        )


@torch.inference_mode()
def _refuse_encoder(network: PreTrainedModel, model: str) -> None:
    """Raise ConfigError if logits depend on tokens that come later."""
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], device=network.device)
    one, other = network(input_ids=ids, use_cache=False).logits[:, :2].float()
    if float((one - other).abs().max()) > _CAUSAL_TOLERANCE * float(one.abs().max()):
        raise ConfigError(
            f"model {model}: {type(network).__name__} sees tokens before they are sampled: it is "
            "an encoder, not a causal LM"
        )


def pick_device(device: Device) -> torch.device:
    """The device to compute on; ConfigError: a GPU was asked for by name and is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= count:
        sees = ", ".join(f"cuda:{number}" for number in range(count)) or "no GPU"
        fix = "cuda:0" if count else "cpu"
        raise ConfigError(f"--device {device}: torch sees {sees} here; take {fix} or auto")
    return place


def load_error_line(model: str, error: BaseException) -> str:
    """One line that says what to do about a model that did not load."""
    if "trust_remote_code" in str(error):
        return (
            f"model {model}: transformers has no class for it, and code that comes with a model "
            f"({AUTO_MAP}) is never run; take another model"
        )
    if Path(model).is_dir():
        is_told = isinstance(error, OSError | ValueError) and str(error)
        said = f"{error}" if is_told else f"{type(error).__name__}: {error}"
        why = " ".join(said.split())[:_REASON_CHARS]
        return f"model {model}: {why}" + (f"; {NEEDED}" if isinstance(error, OSError) else "")
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return (
        f"model {model}: not loaded from the hub or its cache {home} ({first_line(error)}); "
        "connect to the internet, set HF_HOME to a cache that holds it, or name a local model "
        "directory"
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """64 hex digits over vocabulary, merges, added tokens and chat template. Token ids and
    log-probs may be exchanged only between equal fingerprints."""
    merges: object = []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        merges = json.loads(backend.to_str())["model"].get("merges", [])
    added = {
        str(index): [str(token), bool(token.special), bool(token.lstrip), bool(token.rstrip)]
        for index, token in tokenizer.added_tokens_decoder.items()
    }
    content = {
        "vocab": tokenizer.get_vocab(),
        "merges": merges,
        "added": added,
        "chat_template": tokenizer.chat_template,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
