"""One frozen tree of settings, validated at start.

A *run* (`RunConfig`) is what all its nodes must share: environments, rules, limits. It comes from
a TOML file and its fingerprint is part of the run id, so nodes with different rules never meet.
A *node* (`NodeConfig`) is one machine. Its settings come, first match wins, from flags,
`SWARM_NODE_<FIELD>` environment variables, the `[node]` table of the run file, and the defaults.
"""

import hashlib
import ipaddress
import json
import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from node.config_errors import Source, config_error
from node.engines.base import Sampling
from node.engines.quantisation import Quantisation
from node.tasks.registry import environment
from node.training.adapter_files import ALPHA_MAX, RANK_MAX, TARGETS_MAX
from node.training.spec import DEFAULT_LOSS, Aggregation, loss_parameters
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import public_key_of
from swarm.peers.invite import Invitation
from swarm.telemetry.broker_address import PASSWORD_VARIABLE, Broker
from swarm.telemetry.web_hosts import checked_name
from swarm.wire.messages import (
    ADDRESS_CHARS_MAX,
    ADDRESSES_MAX,
    COMPLETIONS_MAX,
    LEASE_MS_MAX,
    PARAMETERS_CHARS_MAX,
    TEXT_CHARS_MAX,
    TOKENS_MAX,
)

ENVIRON_PREFIX = "SWARM_NODE_"
RUN_VARIABLE = "SWARM_NODE_RUN"
PASSPHRASE_VARIABLE = "SWARM_NODE_PASSPHRASE"
DEFAULT_RUN = "demo"
RUN_FILE_BYTES_MAX = 1_048_576
RUN_HASH_CHARS = 12
PUBLISHERS_MAX = 64
OVER_PROVISION_MAX = 4.0


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _parameters_text(value: Any) -> Any:
    """Canonical JSON from a table, or from JSON text as a dumped run holds it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be a table") from None
    if not isinstance(value, Mapping):
        raise ValueError("must be a table")  # noqa: TRY004 - what pydantic asks of validators
    try:
        return canonical_json(value)
    except (TypeError, ValueError):
        raise ValueError("may hold only numbers, texts, booleans, lists and tables") from None


def _split(value: Any) -> Any:
    """Lists come as one comma-separated text from flags and environment variables."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


def _run_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", text):
        raise ValueError("must be up to 40 lower-case letters, digits and hyphens")
    return text


_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[!-.0-~]{1,128})/tcp/(?P<port>[0-9]{1,5})"
    r"(/p2p/(?P<peer>[!-.0-~]+))?"
)


_DNS_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DNS_NAME = re.compile(rf"({_DNS_LABEL}\.)*{_DNS_LABEL}")


def _check_address(text: str, *, with_peer: bool) -> str:
    shape = "/ip4/<address>/tcp/<port>" + ("/p2p/<peer id>" if with_peer else "")
    match = _ADDRESS.fullmatch(text)
    if match is None or (with_peer and match["peer"] is None) or int(match["port"]) > 65_535:
        raise ValueError(f"must look like {shape}")
    try:
        if match["kind"] == "ip4":
            ipaddress.IPv4Address(match["host"])
        elif match["kind"] == "ip6":
            ipaddress.IPv6Address(match["host"])
        elif not _DNS_NAME.fullmatch(match["host"]):
            raise ValueError(f"{match['host']} is no DNS name")
        if match["peer"] is not None:
            public_key_of(match["peer"])
    except ipaddress.AddressValueError:
        raise ValueError(f"{match['host']} is no {match['kind']} address") from None
    except RemoteProtocolError as error:
        raise ValueError(f"{match['peer']}: {error.detail}; copy it whole") from None
    return text


def _peer_address(text: str) -> str:
    relay, through, peer = text.partition("/p2p-circuit/p2p/")
    _check_address(relay, with_peer=True)
    if through:  # to the peer through the relay before it
        _check_address(f"{relay.partition('/p2p/')[0]}/p2p/{peer}", with_peer=True)
    return text


def _listen_address(text: str) -> str:
    _check_address(text, with_peer=False)
    if not text.startswith(("/ip4/", "/ip6/")) or "/p2p/" in text:
        raise ValueError("must look like /ip4/0.0.0.0/tcp/0 or /ip6/::/tcp/0")
    return text


def _publisher(text: str) -> str:
    try:
        public_key_of(text)
    except RemoteProtocolError as error:
        raise ValueError(
            f"{error.detail}; swarm-node keygen prints the id that goes with a key"
        ) from None
    return text


def _announce_address(text: str) -> str:
    return _check_address(text, with_peer=False)


def _invitation(text: str) -> str:
    try:
        Invitation.decode(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


def _broker(text: str) -> str:
    try:
        Broker.parse(text)
    except ConfigError as error:
        raise ValueError(str(error).partition(": ")[2]) from None
    return text


def _host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("must look like 127.0.0.1:9464")
    return text


def _web_name(text: str) -> str:
    try:
        return checked_name(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None


_AddressText = Annotated[str, Field(max_length=ADDRESS_CHARS_MAX)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EnvironmentSpec(_Frozen):
    """One environment of a run. `version` is filled in from what is installed; a run file may pin
    it, and then another installed version is an error instead of another run."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    weight: Annotated[float, Field(gt=0)] = 1.0  # share of tasks, relative to the others'
    parameters: Annotated[
        str, Field(max_length=PARAMETERS_CHARS_MAX), BeforeValidator(_parameters_text)
    ] = "{}"  # canonical JSON
    version: Annotated[str, Field(max_length=64)] = ""

    @model_validator(mode="before")
    @classmethod
    def _resolve_version(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return value
        installed = environment(value["name"]).version
        wanted = value.get("version") or installed
        if wanted != installed:
            raise ConfigError(
                f"environment {value['name']}: this run needs version {wanted}, installed is "
                f"{installed}; install the former"
            )
        return {**value, "version": installed}


class SamplingRules(_Frozen):
    """How every node of the run samples."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] = 64


class RunLimits(_Frozen):
    """What a node of the run accepts from another."""

    group_size_max: Annotated[int, Field(ge=1, le=COMPLETIONS_MAX)] = COMPLETIONS_MAX
    record_life_s: Annotated[int, Field(ge=1, le=604_800)] = 3600  # from creation to expiry
    clock_skew_s: Annotated[int, Field(ge=0, le=3600)] = 120
    prompt_chars_max: Annotated[int, Field(ge=1, le=TEXT_CHARS_MAX)] = 8192
    text_chars_max: Annotated[int, Field(ge=1, le=TEXT_CHARS_MAX)] = 8192  # of a completion


class HeldOutRules(_Frozen):
    """The evaluation that all nodes of the run share."""

    tasks: Annotated[int, Field(ge=1, le=10_000)] = 200


class LearnerRules(_Frozen):
    """A central learner, and what it and its workers must agree on."""

    peer: Annotated[str, AfterValidator(_publisher)]  # whose weights the workers generate with
    model: Annotated[str, Field(min_length=1)] = "tiny"
    staleness_max: Annotated[int, Field(ge=0, le=1024)] = 4  # S, in steps
    publish_every_steps: Annotated[int, Field(ge=1, le=1024)] | None = None  # None: S - 1, or 1
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 16  # R
    group_size: Annotated[int, Field(ge=2, le=COMPLETIONS_MAX)] = 8  # G
    lease_life_s: Annotated[int, Field(ge=1, le=LEASE_MS_MAX // 1000)] = 300
    pool_groups_per_step: Annotated[int, Field(ge=0, le=1024)] = 0  # J, of shared rollouts
    rescored_share: Annotated[float, Field(ge=0, le=1)] = 0.1  # of workers in good standing

    @property
    def publish_every(self) -> int:
        """How many steps there are from one published version to the next."""
        return self.publish_every_steps or max(1, self.staleness_max - 1)

    @model_validator(mode="after")
    def _published_in_time(self) -> Self:
        if self.publish_every > max(1, self.staleness_max):
            raise ConfigError(
                f"learner.publish_every_steps = {self.publish_every}: with staleness_max = "
                f"{self.staleness_max} no group would be fresh enough; take at most "
                f"{max(1, self.staleness_max)}"
            )
        return self


class TrainingRules(_Frozen):
    """The loss by name, and its parameters; None: what the loss has by itself
    (`node.training.spec.LOSSES`)."""

    loss: str = DEFAULT_LOSS
    aggregation: Aggregation | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    behaviour_weight_max: float | None = None
    second_moment_max: float | None = None
    unknown_share_max: float | None = None

    @field_validator("loss")
    @classmethod
    def _is_known(cls, name: str) -> str:
        loss_parameters(name, {})
        return name

    @model_validator(mode="after")
    def _suits_the_loss(self) -> Self:
        try:
            loss_parameters(self.loss, self.model_dump(exclude={"loss"}))
        except ValueError as error:
            raise ConfigError(f"training.loss = {self.loss}: {error}") from None
        return self


class RunConfig(_Frozen):
    """What all nodes of a run share; any difference makes another run id."""

    name: Annotated[str, AfterValidator(_run_name)]
    environments: Annotated[tuple[EnvironmentSpec, ...], Field(min_length=1, max_length=64)]
    sampling: SamplingRules = SamplingRules()
    limits: RunLimits = RunLimits()
    held_out: HeldOutRules = HeldOutRules()
    training: TrainingRules = TrainingRules()
    models: tuple[str, ...] = ()  # allowed model names; empty: any
    reward: Literal["exact", "partial"] = "exact"  # exact: 1 for a full score, else 0
    publishers: Annotated[
        tuple[Annotated[str, AfterValidator(_publisher)], ...],
        Field(max_length=PUBLISHERS_MAX),
        AfterValidator(lambda ids: tuple(sorted(set(ids)))),
    ] = ()  # peer ids of those who may publish weights; empty: nobody but the learner
    learner: LearnerRules | None = None

    @property
    def weights_publishers(self) -> tuple[str, ...]:
        """Whose weights are believed."""
        learner = (self.learner.peer,) if self.learner else ()
        return tuple(sorted({*self.publishers, *learner}))

    @cached_property
    def run_id(self) -> str:
        """`<name>-<fingerprint of everything in here>`. What a run leaves out that earlier releases
        did not know does not enter, so that nodes of different releases meet."""
        unset = {name for name in ("publishers", "learner") if not getattr(self, name)}
        if self.training == TrainingRules():
            unset.add("training")
        rules = canonical_json(self.model_dump(mode="json", exclude=unset))
        return f"{self.name}-{hashlib.sha256(rules.encode()).hexdigest()[:RUN_HASH_CHARS]}"

    @property
    def engine_sampling(self) -> Sampling:
        """The sampling rules as an engine takes them."""
        rules = self.sampling
        return Sampling(rules.temperature, rules.top_p, rules.max_new_tokens)


class NodeConfig(_Frozen):
    """One machine in the swarm. Every field is a flag of `swarm-node join` (`flag_of`)."""

    run: RunConfig

    # network
    listen: Annotated[
        tuple[Annotated[_AddressText, AfterValidator(_listen_address)], ...],
        BeforeValidator(_split),
        Field(min_length=1, max_length=ADDRESSES_MAX),
    ] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Annotated[
        tuple[Annotated[_AddressText, AfterValidator(_announce_address)], ...],
        BeforeValidator(_split),
        Field(max_length=ADDRESSES_MAX),
    ] = ()  # told to others instead of what can be seen from here; for port forwarding
    peers: Annotated[
        tuple[Annotated[_AddressText, AfterValidator(_peer_address)], ...],
        BeforeValidator(_split),
        Field(max_length=64),
    ] = ()  # bootstrap peers; empty: start a swarm
    invite: Annotated[Annotated[str, AfterValidator(_invitation)] | None, Field(repr=False)] = (
        None  # an invitation to a swarm, which may hold the key to it
    )
    private: bool = False  # start a swarm that only those with an invitation can join
    allow: Path | None = None  # of peer ids; others are refused
    relay: bool = True  # carry connections for peers that cannot be reached
    upnp: bool = True  # ask the router to forward our port
    dht: bool = True  # find, and help others to find, peers of a run; never in a private swarm
    lan: bool = True  # look for peers on the local network
    share: Literal["all", "none"] = "all"
    role: Literal["worker", "node"] = "worker"  # where the run has a learner: work for it, or not
    coordinator: Annotated[str, AfterValidator(_publisher)] | None = (
        None  # of a learner: the peer id of who may plan its workers
    )
    tokens_per_s_max: PositiveSeconds | None = None  # of a worker, in the mean; None: what it can

    # policy and rollouts
    model: Annotated[str, Field(min_length=1)] = "tiny"
    engine: Literal["torch", "vllm", "scripted"] = "torch"
    engine_update: Literal["keep", "drain", "abort"] = (
        "keep"  # what vLLM does with unfinished completions when new weights come
    )
    engine_lora: Literal["merged", "native"] = (
        "merged"  # how vLLM gets adapters: merged into the model, or as they are, by its own LoRA
    )
    engine_sleep: bool = True  # on the trainer's GPU, vLLM gives its memory back while this trains
    engine_gpu_share: Annotated[float, Field(gt=0, lt=1)] | None = (
        None  # of a GPU's memory, that vLLM takes; None: what the trainer leaves
    )
    engine_quantization: Quantisation = (
        "none"  # how vLLM quantises the policy's weights as they go in: none, fp8 or int8
    )
    local_groups: Annotated[int, Field(ge=0, le=1024)] = 4  # I
    external_groups: Annotated[int, Field(ge=0, le=1024)] = 4  # J
    group_size: Annotated[int, Field(le=COMPLETIONS_MAX)] = 8  # G, at least 2 if I > 0
    over_provision: Annotated[float, Field(ge=1, le=OVER_PROVISION_MAX)] = (
        1.0  # times I groups are begun; the rest goes on in the next round (engine vllm)
    )
    filter_own: bool = False  # generate more than I groups and drop those without an advantage

    # training
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 2e-4
    updates_per_batch: Annotated[int, Field(ge=1, le=64)] = 1
    foreign_logprob_min: Annotated[float, Field(lt=0)] | None = (
        None  # leaves foreign tokens that the own policy finds less likely out of training
    )
    lora_rank: Annotated[int, Field(ge=0, le=RANK_MAX)] = (
        0  # train an adapter of this rank in place of the model; 0: the model
    )
    lora_alpha: Annotated[float, Field(gt=0, le=ALPHA_MAX)] | None = None  # None: twice the rank
    lora_targets: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...],
        BeforeValidator(_split),
        Field(max_length=TARGETS_MAX),
    ] = ()  # layers with an adapter, such as q_proj; none: all of attention and MLP
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 16_384  # padded tokens, prompts included
    threads: Annotated[int, Field(ge=0, le=1024)] = 0  # of torch and vLLM; 0: see `threads_of`

    # course
    rounds: Count | None = None  # None: until interrupted
    stop_after_s: PositiveSeconds | None = None  # then evaluate, save and leave
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    evaluate_every_rounds: CountOrNone = 10  # 0: never
    checkpoint_every_rounds: Count = 1
    checkpoints_kept: Count = 2

    # files and keys
    data_dir: Path = Path("swarm-data")
    cache_dir: Path | None = None  # of made policies; None: swarm-node in the user's cache
    key_file: Path | None = None  # None: identity.pem in the data directory
    passphrase_env: Annotated[str, Field(min_length=1)] = PASSPHRASE_VARIABLE  # where to look

    # limits
    pool_groups_max: Count = 4096
    pool_bytes_max: Annotated[int, Field(ge=1_048_576)] = 268_435_456
    pool_groups_per_peer_max: Count = 512
    fetch_bytes_per_s_max: Count = 4_194_304
    fetch_concurrent_max: Annotated[int, Field(ge=1, le=64)] = 4
    serve_bytes_per_s_max: Count = 8_388_608
    # Of CPU time, for one foreign group; more is an offence. Of the packaged environments the
    # dearest takes 0.02 s for 64 right answers and 0.2 s for the worst 64 texts; the rest is margin
    # for slow machines and for other environments.
    verify_cpu_s: PositiveSeconds = 2.0
    verify_memory_bytes_max: Annotated[int, Field(ge=67_108_864)] = (
        536_870_912  # beyond what its imports take
    )

    # telemetry
    telemetry: Annotated[str, AfterValidator(_broker)] | None = (
        None  # an MQTT broker that gets a report each interval
    )
    telemetry_ca: Path | None = None  # certificates of who may vouch for the broker
    telemetry_interval_s: Annotated[float, Field(ge=0.5, le=60)] = 2.0
    metrics_listen: Annotated[str, AfterValidator(_host_and_port)] | None = (
        None  # where Prometheus may ask
    )
    web_names: tuple[Annotated[str, AfterValidator(_web_name)], ...] = ()  # by which it may do so

    foreign_share_max: Annotated[float, Field(gt=0, le=1)] = 0.5  # of J, for any one producer

    foreign_shuffle: bool = False  # experiments only: breaks the link from task to completions

    @property
    def merges_adapters(self) -> bool:
        """Whether the engine gets an adapter merged into its model, and not as it is."""
        return self.engine == "vllm" and self.engine_lora == "merged"

    @property
    def key_path(self) -> Path:
        """Where the node's key is."""
        return self.key_file or self.data_dir / "identity.pem"

    @cached_property
    def invitation(self) -> Invitation | None:
        """What the invitation says."""
        return Invitation.decode(self.invite) if self.invite else None

    @property
    def bootstrap(self) -> tuple[str, ...]:
        """Peers to join through: those named, then those of the invitation."""
        invited = self.invitation.addresses if self.invitation else ()
        return tuple(dict.fromkeys((*self.peers, *invited)))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.invitation is not None and self.invitation.run_id != self.run.run_id:
            raise ConfigError(
                f"the invitation is to run {self.invitation.run_id}, but this is run "
                f"{self.run.run_id}: give the other's file with --run"
            )
        if self.local_groups == 0 and self.external_groups == 0:
            raise _Conflict("local_groups", "no groups to train on", "4")
        if self.over_provision > 1.0 and self.engine != "vllm":
            raise _Conflict("over_provision", "needs the engine vllm", "1")
        if self.over_provision > 1.0 and self.engine_update == "abort":
            raise _Conflict(
                "engine_update",
                "begins completions anew that --over-provision leaves for later rounds, and long "
                "ones would never end",
                "keep",
            )
        for name in ("lora_alpha", "lora_targets"):
            if getattr(self, name) and not self.lora_rank:
                raise _Conflict("lora_rank", f"{name} is of an adapter, and none is trained", "16")
        least = 2 if self.local_groups > 0 else 1
        if self.group_size < least:
            raise _Conflict("group_size", f"must be at least {least}", "8")
        if self.group_size > self.run.limits.group_size_max:
            most = self.run.limits.group_size_max
            raise _Conflict("group_size", f"run {self.run.name} allows at most {most}", str(most))
        if self.run.models and self.model not in self.run.models:
            allowed = ", ".join(self.run.models)
            raise _Conflict(
                "model", f"run {self.run.name} allows only {allowed}", self.run.models[0]
            )
        return self

    @model_validator(mode="after")
    def _quantises_what_it_can(self) -> Self:
        if self.engine_quantization != "none":
            if self.engine != "vllm":
                raise _Conflict("engine_quantization", "needs the engine vllm", "none")
            if self.engine_lora == "native":
                raise _Conflict(
                    "engine_lora", "puts adapters on weights that are not quantised", "merged"
                )
        return self


class _Conflict(Exception):
    """Fields that are right alone do not fit together; `fix` is a value that would."""

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(field, problem, fix)
        self.field = field
        self.problem = problem
        self.fix = fix


def packaged_runs() -> tuple[str, ...]:
    """Names of the runs that come with the package."""
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in files("node").joinpath("runs").iterdir()
            if entry.name.endswith(".toml")
        )
    )


def _read_run_file(run_file: Path | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The label and the text of the run file: a path, or the name of a packaged run."""
    wanted = str(run_file) if run_file is not None else environ.get(RUN_VARIABLE, DEFAULT_RUN)
    if wanted in packaged_runs():
        label = f"{wanted}.toml"
        return label, files("node").joinpath("runs", label).read_text(encoding="utf-8")
    path = Path(wanted)
    try:
        with path.open("rb") as file:
            raw = file.read(RUN_FILE_BYTES_MAX + 1)
        if len(raw) > RUN_FILE_BYTES_MAX:
            raise ConfigError(f"--run {wanted}: larger than {RUN_FILE_BYTES_MAX} bytes")
        return path.name, raw.decode()
    except OSError as error:
        raise ConfigError(
            f"--run {wanted}: {error.strerror}; give a TOML file or one of "
            f"{', '.join(packaged_runs())}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--run {wanted}: not UTF-8 text; give a TOML file") from None


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings from `SWARM_NODE_<FIELD>`. Unknown ones are kept, so that a typo is refused."""
    passphrase = environ.get(f"{ENVIRON_PREFIX}PASSPHRASE_ENV", PASSPHRASE_VARIABLE)
    no_settings = {
        RUN_VARIABLE,
        PASSPHRASE_VARIABLE,
        PASSWORD_VARIABLE,
        passphrase,
    }
    return {
        name.removeprefix(ENVIRON_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENVIRON_PREFIX) and name not in no_settings
    }


def load_run(run_file: Path | None, environ: Mapping[str, str]) -> tuple[RunConfig, dict[str, Any]]:
    """The run, and the `[node]` table of its file.

    Raises:
        ConfigError: unreadable or wrong.
    """
    label, text = _read_run_file(run_file, environ)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{label}: not TOML ({error}); correct the file") from None
    node_table = table.pop("node", {})
    if not isinstance(node_table, dict):
        raise ConfigError(f"node in {label}: must be a table; write [node]")
    try:
        return RunConfig.model_validate(table), node_table
    except ValidationError as error:
        raise config_error(error, RunConfig, lambda _: Source.in_file(label)) from None


def _invited_run(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """The packaged run that an invitation is to, where no run is named otherwise."""
    text = flags.get("invite") or environ.get(f"{ENVIRON_PREFIX}INVITE")
    if not text or RUN_VARIABLE in environ:
        return None
    try:
        name = Invitation.decode(str(text)).run_id.rpartition("-")[0]
    except ConfigError:
        return None  # told when all settings are checked
    return Path(name) if name in packaged_runs() else None


def load_config(
    flags: Mapping[str, Any], environ: Mapping[str, str], run_file: Path | None = None
) -> NodeConfig:
    """All settings of this node.

    Args:
        flags: by field name; None means not given.
        environ: the process environment.
        run_file: a path or the name of a packaged run; None: `SWARM_NODE_RUN`, else the demo.

    Raises:
        ConfigError: one line that names the setting, its value and what to do.
    """
    run_file = run_file or _invited_run(flags, environ)
    run, node_table = load_run(run_file, environ)
    label = _read_run_file(run_file, environ)[0]
    layers: list[tuple[Source, Mapping[str, Any]]] = [
        (Source.in_file(label, "node."), node_table),
        (Source.in_environ(ENVIRON_PREFIX), _from_environ(environ)),
        (Source.in_flags(), {name: value for name, value in flags.items() if value is not None}),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    values["run"] = run

    def source_of(field: str) -> Source:
        return sources.get(field, Source.in_flags())

    try:
        return NodeConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error, NodeConfig, source_of) from None
    except _Conflict as conflict:
        value = values.get(conflict.field, NodeConfig.model_fields[conflict.field].default)
        raise ConfigError(
            source_of(conflict.field).message(conflict.field, value, conflict.problem, conflict.fix)
        ) from None
