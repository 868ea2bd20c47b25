"""The settings of one machine, by group.

Each setting is declared once: type and bounds, default, meaning, and the differing parts of its
flag. Everything else about it follows. A name ends with the unit of its number.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from node.config.described import (
    METHOD,
    AnnounceAddress,
    BrokerUrl,
    DeviceName,
    Flag,
    ForkSource,
    HostAndPort,
    HoursText,
    InvitationText,
    Listed,
    ListenAddress,
    Name,
    PeerAddress,
    PublisherId,
    Seed,
    ServerUrl,
    StartName,
    WebName,
)
from node.config.run import Count, Frozen, LearnerRules, RunConfig
from node.envs.base import TellsTurns
from node.envs.registry import interaction
from node.interfaces.adapter_files import ALPHA_MAX, RANK_MAX, TARGETS_MAX, Held
from node.interfaces.quantisation import Quantisation
from node.interfaces.trainer_spec import (
    CONTEXT_TOKENS_MIN,
    THREADS_MAX,
    ForeignWeighting,
    Forward,
    Precision,
    Recomputing,
    WantedPrecision,
)
from node.methods.advantages import Grpo
from node.methods.choices import (
    KNOWN,
    Advantage,
    Control,
    Correction,
    Draw,
    ExternalRule,
    Filter,
    Generate,
    Loss,
    Preference,
    Replay,
    Reward,
    chosen_loss,
)
from node.methods.loss_settings import DEFAULT_LEARNER_LOSS, DEFAULT_LOSS
from node.methods.method import Family, MethodSettings, Need
from node.methods.task_control import AdaptiveExternal
from node.system.child_environment import PASSPHRASE_VARIABLE
from swarm.errors import ConfigError
from swarm.peers.invite import Invitation
from swarm.wire.messages import ADDRESSES_MAX, COMPLETIONS_MAX

OVER_PROVISION_MAX = 4.0
ENGINE_NEEDS = frozenset(
    {
        *(Need.REQUESTS, Need.BEGINNINGS, Need.RUNNERS_UP, Need.DRAFTS),
        *(Need.NOISE, Need.ENTROPY, Need.HIDDEN, Need.REFERENCE, Need.FEATURES),
    }
)
ENGINE_GIVES: Mapping[str, frozenset[Need]] = {
    "torch": ENGINE_NEEDS,
    "vllm": frozenset({Need.REQUESTS, Need.BEGINNINGS, Need.REFERENCE, Need.FEATURES}),
    "openai": frozenset(),
    "scripted": frozenset({Need.FEATURES}),
}  # of `Capabilities` before an engine has started, and of its trainer
M = TypeVar("M", bound=MethodSettings)

PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]  # multiples of it are set as timers
OFTEN = Flag(often=True)
BY_NAME = Flag(metavar=METHOD)


class Group(Frozen):
    """Settings that belong together; the docstring is their title."""

    model_config = ConfigDict(defer_build=True)  # `NodeConfig` alone validates


class PolicySettings(Group):
    """Run and policy."""

    run: Annotated[RunConfig, Flag(metavar="FILE", often=True)]
    """The rules that all nodes share: a run file, a packaged run, or a run's id."""
    model: Annotated[Name, Flag(metavar="MODEL", often=True)] = "tiny"
    """The initial policy: `tiny`, `smollm2`, a Hugging Face directory, a GGUF file, or a hub id."""
    yes: Annotated[bool, OFTEN] = False
    """Agree beforehand to fetching a model, to plug-ins, and to the model of a run from a peer."""
    lora_rank: Annotated[int, Field(ge=0, le=RANK_MAX), OFTEN] = 0
    """The rank of the adapter (LoRA) to train. 0: the whole model is trained."""
    lora_alpha: Annotated[float, Field(gt=0, le=ALPHA_MAX)] | None = None
    """The adapter is scaled by alpha / rank. None: alpha is twice the rank."""
    lora_targets: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...],
        Listed,
        Field(max_length=TARGETS_MAX),
    ] = ()
    """The layers that get an adapter, such as `q_proj`. None: all of attention and MLP."""
    lora_base: Held = "bfloat16"
    """The precision of the frozen weights under an adapter. `4bit` applies to the adapted layers
    and needs bitsandbytes and an NVIDIA GPU. Adapter, gradients and optimizer stay in fp32. A
    worker that only loads adapters follows its learner unless this is set."""
    precision: WantedPrecision = "auto"
    """The precision that the trainer and the engine `torch` compute in. `auto`: bf16 on a GPU, and
    on a processor where it is clearly faster for a model of 50 M parameters or more. Weights,
    gradients and optimizer stay in fp32."""
    threads: Annotated[int, Field(ge=0, le=THREADS_MAX), OFTEN] = 0
    """The threads of torch and of vLLM. 0: the cores divided by this user's running nodes."""
    device: Annotated[DeviceName, OFTEN] = "auto"
    """The device that trains, and that samples with the engine `torch`: `cpu`, `cuda`, or one of
    several GPUs, such as `cuda:1`. `auto`: the first GPU if there is one."""
    seed: Annotated[Seed, Field(ge=0, lt=2**63), OFTEN] = 0
    """The seed of this node's sampling. The flag of `swarm-node join` also takes a range, such as
    0..4: a sweep, one start after another."""
    task_seed: Annotated[int | None, Field(ge=0, lt=2**63), OFTEN] = None
    """The number that tasks and sampling follow in place of the node's key, so that a run repeats
    with any key. It needs `share = "none"`: others know a node's tasks by its key. None: they
    follow the key."""


class NetworkSettings(Group):
    """Network."""

    peers: Annotated[
        tuple[PeerAddress, ...],
        Listed,
        Field(max_length=64),
        Flag("peer", metavar="ADDR", often=True),
    ] = ()
    """The nodes to join through. With none, and no invitation, the node starts a swarm."""
    invite: Annotated[InvitationText | None, Field(repr=False), OFTEN] = None
    """An invitation to a swarm; `-` reads it from standard input, hidden from other users. It may
    hold a private swarm's key, so it is never shown."""
    private: Annotated[bool, OFTEN] = False
    """Start a swarm that only those with an invitation can join."""
    listen: Annotated[
        tuple[ListenAddress, ...],
        Listed,
        Field(min_length=1, max_length=ADDRESSES_MAX),
        Flag(metavar="ADDR", often=True),
    ] = ("/ip4/0.0.0.0/tcp/0",)
    """The addresses to listen on. Port 0 takes a free port, after a restart the same if
    possible."""
    announce: Annotated[
        tuple[AnnounceAddress, ...], Listed, Field(max_length=ADDRESSES_MAX), Flag(metavar="ADDR")
    ] = ()
    """The addresses for others to dial instead of the detected ones, if you forward a port."""
    allow: Path | None = None
    """A file of the only peer ids that the node talks to, one a line."""
    relay: bool = True
    """Carry connections for peers that nobody can dial."""
    upnp: bool = True
    """Ask the router to forward the node's port."""
    dht: bool = True
    """Find the run's peers by the distributed hash table. Never in a private swarm."""
    lan: bool = True
    """Look for peers on the local network."""
    role: Annotated[Literal["worker", "node"], OFTEN] = "worker"
    """The node's part in a run with a learner: work for it, or learn by itself."""
    coordinator: Annotated[PublisherId | None, Flag(metavar="PEER", often=True)] = None
    """The peer id of the coordinator that may plan this learner's workers."""
    share: Annotated[Literal["all", "none"], OFTEN] = "all"
    """Offer the node's own groups to others: all of them, or none."""


class GuestSettings(Group):
    """When and how much the node works."""

    busy_share: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """The share of time that the node works; it rests after each round."""
    quiet_hours: Annotated[
        tuple[HoursText, ...], Listed, Field(max_length=16), Flag(metavar="HOURS")
    ] = ()
    """Local hours in which the node does nothing, such as 22:00-07:00."""
    pause_on_battery: bool = False
    """Do nothing while the machine runs on its battery."""
    tokens_per_s_max: PositiveSeconds | None = None
    """The mean rate of a worker's generation at most. None: no limit."""
    rounds: Annotated[Count | None, Flag(alias="steps", often=True)] = None
    """Stop after this number of rounds, or of a learner's steps. None: never."""
    stop_after_s: Annotated[PositiveSeconds | None, Flag("stop-after", often=True)] = None
    """Evaluate, save and leave after this time. None: never."""


class EngineSettings(Group):
    """Engine."""

    engine: Annotated[Literal["torch", "vllm", "openai", "scripted"], OFTEN] = "torch"
    """The engine that samples completions. `openai` is a model on the server at `engine_url`: the
    node generates and shares, but trains and evaluates nothing. `scripted` is for simulations."""
    engine_url: Annotated[ServerUrl | None, Flag(metavar="URL", often=True)] = None
    """The address of the server of the engine `openai`, including `/v1`: llama.cpp, Ollama, vLLM,
    SGLang, MLX or another with OpenAI's interface."""
    engine_key_env: Annotated[Name | None, Flag(metavar="VARIABLE")] = None
    """The variable that holds that server's key. None: it needs none."""
    engine_prompts: Literal["chat", "text"] = "chat"
    """Send that server messages, or plain text for models without a chat template."""
    engine_tokenizer: Annotated[Path | None, Flag(metavar="DIR")] = None
    """A directory with the served model's tokenizer. With it, and at temperature 1, the node shares
    log-probs for nodes of the same tokenizer. None: it shares texts alone."""
    engine_requests_max: Annotated[int, Field(ge=1, le=1024)] = 16
    """The number of simultaneous requests to that server."""
    engine_update: Literal["keep", "drain", "abort"] = "keep"
    """The fate of vLLM's unfinished completions when new weights come. `keep` continues them under
    the new weights, `drain` finishes them first, `abort` begins them again."""
    engine_sleep: bool = True
    """Free vLLM's memory while the trainer works on the same GPU."""
    engine_gpu_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of a GPU's memory for vLLM. None: all that the trainer leaves."""
    engine_gpus: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of GPUs for the policy in vLLM (tensor parallel)."""
    engine_quantization: Quantisation = "none"
    """The quantisation of the policy in vLLM. The trainer stays in full precision."""
    context_tokens_max: Annotated[int, Field(ge=CONTEXT_TOKENS_MIN)] | None = None
    """The length of a prompt with its completion at most. None: the model's limit up to 32,768; in
    vLLM, which reserves memory for it, 4,096 and the run's longest completion."""


class RoundSettings(Group):
    """Groups of a round."""

    local_groups: Annotated[int, Field(ge=0, le=1024), Flag("local", metavar="I", often=True)] = 4
    """I: the number of groups that the node generates in a round."""
    external_groups: Annotated[
        int, Field(ge=0, le=1024), Flag("external", metavar="J", often=True)
    ] = 4
    """J: the number of others' groups that the node draws for a round."""
    group_size: Annotated[int, Field(le=COMPLETIONS_MAX), Flag(metavar="G", often=True)] = 8
    """G: the number of completions of a task, at least 2 if the node generates groups."""
    over_provision: Annotated[float, Field(ge=1, le=OVER_PROVISION_MAX)] = 1.0
    """The number of groups that a round begins, in multiples of I. The round takes the first I; the
    others continue in later rounds. It needs the engine `vllm`, or a run with turns."""
    foreign_share_max: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of J from one producer at most, while others offer groups."""
    control: Annotated[Control | None, BY_NAME] = None
    """The choice of tasks, and the number and length of completions, as in `vade, ahead=8`. Several
    methods follow each other, as in `vade, dars`. `swarm-node methods` lists them."""
    generate: Annotated[Generate | None, BY_NAME] = None
    """The beginnings of completions, and the way they are sampled, as in `speculative`.
    `swarm-node methods` lists them."""
    draw: Annotated[Draw | None, BY_NAME] = None
    """The choice of others' groups, for a node that learns by itself. `need` prefers tasks that the
    node rarely solves. None: all alike. `swarm-node methods` lists them."""
    external_rule: Annotated[ExternalRule | None, BY_NAME] = None
    """The number of others' groups, for a node that learns by itself. `adaptive_external` takes
    none, some or all of J by their effect on the validation tasks. None: J. `swarm-node methods`
    lists them."""
    reward: Annotated[Reward | None, BY_NAME] = None
    """Rewards to train on in place of the verifier's, as in `majority`. `swarm-node methods` lists
    them."""
    replay: Annotated[Replay | None, BY_NAME] = None
    """Completions of others or of the past that join own groups, as in `rescue`. `swarm-node
    methods` lists them."""
    filter: Annotated[Filter | None, BY_NAME] = None
    """The groups, completions and tokens that are trained on, as in `overlong, extremes`.
    `swarm-node methods` lists them."""


class TrainingSettings(Group):
    """Training."""

    learning_rate: Annotated[float | None, Field(gt=0, le=1), Flag(metavar="LR", often=True)] = None
    """The learning rate of Adam. None: 1e-4 for an adapter and a model up to 10 million parameters,
    1e-5 up to 1 billion, 2e-6 above."""
    warm_up_updates: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """The updates until the learning rate is full. None: 10, or 0 up to 10 million parameters."""
    updates_per_batch: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of optimizer steps on one batch."""
    kl_weight: Annotated[float, Field(ge=0, le=10)] = 0.0
    """The weight in the loss of the policy's divergence from a reference: the policy at the start,
    or at the last reset. It is of own tokens. 0: no reference is kept."""
    kl_reset_every: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """The updates until the reference of `kl_weight` becomes the present policy. 0: never."""
    clips_to_median: bool = True
    """Clip gradients to three times the running median of their norms."""
    step_guard: bool = True
    """Undo an update that moves the policy far more than usual, and halve the rate for a while."""
    advantage: Annotated[Advantage, Flag(metavar=METHOD, often=True)] = Grpo()
    """The advantage of a completion over its group, by a method's name and parameters, as in `gapo,
    window_share=0.4`. `swarm-node methods` lists them."""
    loss: Annotated[Loss | None, Flag(metavar=METHOD, often=True)] = None
    """The loss, by a method's name and parameters, as in `cispo, ratio_max=4`. None: the run's
    loss, else `dapo` for a learner and `sapo` for other nodes. `swarm-node methods` lists them."""
    correction: Annotated[Correction | None, BY_NAME] = None
    """The importance weights of the loss `sapo` for tokens with log-probs, as in `icepop,
    weight_max=4`. None: foreign tokens count up to twice. `swarm-node methods` lists them."""
    preference: Annotated[Preference | None, BY_NAME] = None
    """An update on preferred completions after every few batches, as in `dpo, beta=0.1, every=4`.
    Without `kl_weight` its reference is the policy right before. None: there is none."""
    foreign_weighting: ForeignWeighting = "auto"
    """The weight of foreign tokens. `auto` uses the log-probs of nodes with the same tokenizer;
    elsewhere, and in completions below their group's mean, it leaves out unlikely tokens.
    `positives` leaves out completions below the mean. `none` takes every text in full."""
    foreign_logprob_min: Annotated[float, Field(lt=0)] | None = None
    """Leave out foreign tokens below this log-prob under the own policy. None: keep all."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] | None = None
    """The number of tokens in one forward pass of training, with prompts and padding. None: 16,384
    on a GPU and 4,096 on a CPU, fewer if memory is short."""
    activation_checkpointing: Recomputing = "auto"
    """Run layers twice to save memory. `auto`: if memory is short."""
    forward: Forward = "auto"
    """The forward pass of engine `torch` and trainer. `plain`: each row runs whole, without keys
    and values that others share: slow, for models that a start refuses otherwise."""


class SavingSettings(Group):
    """Evaluations and checkpoints."""

    evaluate_every_rounds: Annotated[
        int, Field(ge=0), Flag("evaluate-every", metavar="ROUNDS", often=True)
    ] = 10
    """The rounds between evaluations on the held-out tasks. 0: there are none."""
    validation_tasks: Annotated[int, Field(ge=0, le=2_000)] = 64
    """The validation tasks in each evaluation of a node that learns by itself, for
    `returns_to_best`. The node never trains on them. 0: none."""
    returns_to_best: bool = True
    """Return to the best policy on the validation tasks after two evaluations far below it, and
    halve the learning rate."""
    checkpoint_every_rounds: Annotated[
        Count | None, Flag("checkpoint-every", metavar="ROUNDS", often=True)
    ] = None
    """The rounds between checkpoints. None: as many as keep writing below 2 % of the time."""
    checkpoints_kept: Count = 2
    """The number of checkpoints to keep, besides the best policy's."""
    record_rounds: Annotated[
        int, Field(ge=0, le=1_000), Flag("record", metavar="ROUNDS", often=True)
    ] = 0
    """Record at least this number of the last rounds, so that `swarm-node replay` repeats them. It
    takes two checkpoints and the rounds' groups in `recorded`. 0: none is recorded."""
    publish_precision: Precision = "bfloat16"
    """The precision of a learner's published versions. Small steps change few numbers of
    `bfloat16`, so updates are small, and the sum of many weights still moves with each step.
    Training and adapters stay in fp32."""


class FileSettings(Group):
    """Files and keys."""

    data_dir: Annotated[Path, Flag(metavar="DIR", often=True)] = Path("swarm-data")
    """The directory of the node's files: key, checkpoints, pool, address book, log."""
    fork: Annotated[ForkSource | None, Flag(metavar="DIR@ROUND", often=True)] = None
    """The checkpoint that a new data directory begins with: that of a round of another node's data
    directory, as in `base@40`. The flag takes run, model and LoRA rank from there, too, unless they
    are given. None: the node begins with the model."""
    cache_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """The directory of policies made on this machine. None: `swarm-node` in the user's cache."""
    key_file: Annotated[Path | None, OFTEN] = None
    """The node's private key. None: `identity.pem` in the data directory."""
    passphrase_env: Annotated[Name, Flag(metavar="VARIABLE")] = PASSPHRASE_VARIABLE
    """The variable that holds the passphrase of an encrypted key."""


class LimitSettings(Group):
    """Limits and the sandbox."""

    pool_bytes_max: Annotated[int, Field(ge=1_048_576)] = 268_435_456
    """The size of the pool of groups at most."""
    fetch_bytes_per_s_max: Count = 4_194_304
    """The rate at which the node fetches groups at most."""
    serve_bytes_per_s_max: Count = 8_388_608
    """The rate at which the node serves groups at most."""
    # Ten times the slowest packaged environment's 0.2 s for its worst 64 texts.
    verify_cpu_s: PositiveSeconds = 2.0
    """The CPU time to score one foreign group at most; a slower group counts against its sender."""
    verify_sandbox: Literal["auto", "landlock", "off"] = "auto"
    """The sandbox of scoring. `auto` confines it as far as this machine allows; where that is no
    sandbox, it refuses runs with plug-ins or code. `landlock` accepts them without user namespaces;
    their code cannot open your files, but sees names and sizes. `off` confines nothing."""
    verify_read: Annotated[tuple[Path, ...], Listed] = ()
    """Files and folders that plug-ins may read in scoring, besides Python and packages."""


class WatchingSettings(Group):
    """Output and monitoring."""

    start_name: Annotated[StartName, Flag("name", metavar="NAME", often=True)] = ""
    """The name of this start in `swarm-node runs --mine` and in trackers. None: a number."""
    log: Annotated[Literal["text", "json"], OFTEN] = "text"
    """The form of the output: lines for people, or one JSON object a line."""
    verbose: Annotated[bool, Flag(alias="v", often=True)] = False
    """Print the network's events too: dials, refusals, arrivals."""
    report_to: Annotated[Literal["tensorboard", "wandb", "trackio"] | None, OFTEN] = None
    """An experiment tracker for each round's figures."""
    report_project: Annotated[str, Field(min_length=1, max_length=128)] = "swarm-node"
    """The tracker's project."""
    telemetry: Annotated[BrokerUrl | None, Flag(metavar="URL", often=True)] = None
    """The MQTT broker for regular reports: `mqtt[s]://[user@]host:port`."""
    telemetry_ca: Path | None = None
    """The certificates to trust for a broker at `mqtts://`."""
    telemetry_interval_s: Annotated[float, Field(ge=0.5, le=60), Flag("telemetry-interval")] = 2.0
    """The time between reports."""
    metrics_listen: Annotated[HostAndPort | None, Flag(metavar="HOST:PORT", often=True)] = None
    """The host and port for Prometheus."""
    web_names: Annotated[tuple[WebName, ...], Listed, Flag("web-name", metavar="NAME")] = ()
    """The host names for Prometheus, besides IP addresses and this machine's name."""


class NodeConfig(
    PolicySettings,
    NetworkSettings,
    GuestSettings,
    EngineSettings,
    RoundSettings,
    TrainingSettings,
    SavingSettings,
    FileSettings,
    LimitSettings,
    WatchingSettings,
):
    """One machine in the swarm."""

    @property
    def validated_by(self) -> int:
        """The number of validation tasks; 0 if the node evaluates nothing."""
        return self.validation_tasks if self.evaluate_every_rounds else 0

    @property
    def key_path(self) -> Path:
        return self.key_file or self.data_dir / "identity.pem"

    @property
    def first_round(self) -> int:
        """The rounds behind the policy that the node begins with."""
        return int(self.fork.rpartition("@")[2]) if self.fork else 0

    @cached_property
    def invitation(self) -> Invitation | None:
        return Invitation.decode(self.invite) if self.invite else None

    @property
    def bootstrap(self) -> tuple[str, ...]:
        """Peers to join through: the named ones, then those of the invitation."""
        invited = self.invitation.addresses if self.invitation else ()
        return tuple(dict.fromkeys((*self.peers, *invited)))

    @model_validator(mode="before")
    @classmethod
    def _trains_nothing(cls, values: Any) -> Any:
        """Turn drawing and evaluating off for a node without a trainer, whatever the run file
        says."""
        if isinstance(values, dict) and values.get("engine") == "openai":
            return {**values, "external_groups": 0, "evaluate_every_rounds": 0}
        return values

    @property
    def methods(self) -> tuple[MethodSettings, ...]:
        """All methods that settings name, in the order of a round's stages."""
        return tuple(each for _, each in self.named_methods())

    def named_methods(self) -> Iterator[tuple[Family, MethodSettings]]:
        for family in KNOWN:
            value = getattr(self, family) or ()
            for each in value if isinstance(value, tuple) else (value,):
                yield family, each

    def method(self, kind: type[M]) -> M | None:
        """The settings of a method, if it is used."""
        return next((each for each in self.methods if isinstance(each, kind)), None)

    @property
    def hears_solutions(self) -> bool:
        """True if the node keeps others' right completions of common tasks."""
        return any(Need.PEERS in m.needs and Need.REVISITS in m.needs for m in self.methods)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_run()
        self._check_engine()
        self._check_server()
        self._check_groups()
        self._check_methods()
        self._check_record()
        return self

    def _check_record(self) -> None:
        if not self.record_rounds:
            return
        if self.engine in ("openai", "scripted"):
            raise Conflict("record_rounds", f"the engine {self.engine} trains nothing", "0")
        loss = chosen_loss(loss_of(self, is_learner=False))
        if getattr(loss, "snapshots", 0):
            raise Conflict("record_rounds", f"{loss} has weights that no checkpoint holds", "0")

    def _check_engine(self) -> None:
        if self.engine != "vllm":
            if self.engine_gpus > 1:
                raise Conflict("engine_gpus", "needs the engine vllm", "1")
            if self.engine_quantization != "none":
                raise Conflict("engine_quantization", "needs the engine vllm", "none")
        if self.engine == "vllm" and self.device not in ("auto", "cuda"):
            told = "vLLM takes the GPUs that CUDA_VISIBLE_DEVICES names: set that variable"
            raise Conflict("device", told, "auto")
        if self.run.has_turns and self.engine in ("openai", "scripted"):
            raise Conflict("engine", "samples no tasks of several turns", "torch")

    def _check_server(self) -> None:
        if self.engine != "openai":
            if self.engine_url is not None:
                raise Conflict("engine", "asks no server of engine_url", "openai")
            return
        if self.engine_url is None:
            url = "http://127.0.0.1:8080/v1"
            raise Conflict("engine", f"needs the address of a server: --engine-url {url}")
        if self.local_groups == 0:
            raise Conflict("local_groups", "makes nothing to share", "4")
        if self.run.learner is not None and self.role == "worker":
            raise Conflict("role", "takes the learner's weights, which openai cannot", "node")

    def _check_run(self) -> None:
        run = self.run
        if self.invitation is not None and self.invitation.run_id != run.run_id:
            raise ConfigError(
                f"the link or invitation is to run {self.invitation.run_id}, but this is run "
                f"{run.run_id}: leave --run out, or give the other's file with it"
            )
        if self.group_size > run.limits.group_size_max:
            most = run.limits.group_size_max
            raise Conflict("group_size", f"run {run.name} allows at most {most}", str(most))
        if run.models and self.model not in run.models:
            allowed = ", ".join(run.models)
            raise Conflict("model", f"run {run.name} allows only {allowed}", run.models[0])

    def _check_groups(self) -> None:
        if self.local_groups == 0 and self.external_groups == 0:
            raise Conflict("local_groups", "no groups to train on", "4")
        if self.task_seed is not None and self.share != "none":
            told = "others refuse groups of a task_seed, as they know a node's tasks by its key"
            raise Conflict("share", told, "none")
        if self.over_provision > 1.0:
            if self.engine != "vllm" and not self.run.has_turns:
                raise Conflict("over_provision", "needs the engine vllm, or a run with turns", "1")
            if self.engine_update == "abort":
                raise Conflict(
                    "engine_update",
                    "begins completions anew that --over-provision leaves for later rounds, and "
                    "long ones would never end",
                    "keep",
                )
        for name in ("lora_alpha", "lora_targets"):
            if getattr(self, name) and not self.lora_rank:
                raise Conflict("lora_rank", f"{name} is of an adapter, and none is trained", "16")
        least = 2 if self.local_groups > 0 else 1
        if self.group_size < least:
            raise Conflict("group_size", f"must be at least {least}", "8")

    def _check_methods(self) -> None:
        decide: dict[str, MethodSettings] = {}
        for family, each in self.named_methods():
            self._check_method(family, each)
            self._check_groups_of(family, each)
            for what in sorted(each.decides):
                if what in decide:
                    both = f"{decide[what].kind} and {each.kind}"
                    raise Conflict(family, f"{both} both decide {what}")
                decide[what] = each

    def _check_method(self, family: Family, each: MethodSettings) -> None:
        run, needs = self.run, each.needs
        lacks = sorted((needs & ENGINE_NEEDS) - ENGINE_GIVES[self.engine])
        if lacks:
            raise Conflict("engine", f"has no {', '.join(lacks)} for {each}", "torch")
        if Need.TURNS in needs:
            names = [spec.name for spec in run.environments]
            if silent := [name for name in names if not isinstance(interaction(name), TellsTurns)]:
                told = f"the environment {silent[0]} says nothing of single turns"
                raise Conflict(family, f"{each}: {told}")
        if Need.ONE_TURN in needs and run.has_turns:
            raise Conflict(family, f"{each}: run {run.name} has tasks of several turns")
        kinds = {(spec.name, spec.parameters) for spec in run.environments}
        tells_apart = family == "control" and len(kinds) > 1
        if Need.REVISITS in needs and not run.common.share and not tells_apart:
            told = f"run {run.name} has no tasks that come again: give it common.share"
            raise Conflict(family, f"{each}: {told}")
        if needs & {Need.DRAFTS, Need.RUNNERS_UP} and run.sampling.top_p < 1.0:
            told = f"run {run.name} does not sample by the whole distribution: top_p must be 1"
            raise Conflict(family, told)

    def _check_groups_of(self, family: Family, each: MethodSettings) -> None:
        acts = family not in ("external_rule", "advantage", "loss", "preference", "correction")
        if self.local_groups == 0 and acts:
            raise Conflict("local_groups", f"makes no groups for {each}", "4")
        if Need.PEERS in each.needs and self.external_groups == 0:
            raise Conflict("external_groups", f"fetches nothing for {each}", "4")
        if isinstance(each, AdaptiveExternal):
            for name, usual in (("evaluate_every_rounds", "10"), ("validation_tasks", "64")):
                if not getattr(self, name):
                    raise Conflict(name, f"tells nothing to {each}", usual)
        plans = {"the number of completions", "the length of completions"} & each.decides
        if self.over_provision > 1.0 and (family == "generate" or plans):
            raise Conflict("over_provision", f"begins groups of its own, not by {each}", "1")


class Conflict(Exception):
    """Valid fields that do not fit together; `fix` is a value that would."""

    def __init__(self, field: str, problem: str, fix: str | None = None) -> None:
        super().__init__(field, problem, fix)
        self.field = field
        self.problem = problem
        self.fix = fix


def loss_of(config: NodeConfig, *, is_learner: bool) -> str:
    """The loss that a node or a learner trains by, with its parameters."""
    has_own = is_learner and config.correction is None  # which is of the loss `sapo`
    default = DEFAULT_LEARNER_LOSS if has_own else DEFAULT_LOSS
    return str(config.loss or config.run.training.loss or default)


def rules_of(config: NodeConfig) -> LearnerRules:
    """The learner's rules of a run."""
    if config.run.learner is None:
        raise ConfigError(
            f"run {config.run.name} has no learner: put learner.peer into its file (swarm-node "
            "keygen prints the id of a key), or take part in it with swarm-node join"
        )
    return config.run.learner
