"""The settings of one machine, by group.

A setting is declared once: its type with bounds, its default, its meaning below it, and its flag
where that differs from its name. Flags, variables, run files, `--help`, completion, errors and
docs/settings.md come from here. A name says the unit of its number.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from node.config.described import (
    METHOD,
    AnnounceAddress,
    BrokerUrl,
    Flag,
    HostAndPort,
    HoursText,
    InvitationText,
    Listed,
    ListenAddress,
    Name,
    PeerAddress,
    PublisherId,
    ServerUrl,
    WebName,
)
from node.config.run import Count, Frozen, LearnerRules, RunConfig
from node.interfaces.adapter_files import ALPHA_MAX, RANK_MAX, TARGETS_MAX, Held
from node.interfaces.quantisation import Quantisation
from node.interfaces.trainer_spec import (
    CONTEXT_TOKENS_MIN,
    ForeignWeighting,
    Precision,
    Recomputing,
)
from node.methods.advantages import Grpo
from node.methods.choices import (
    Advantage,
    Control,
    Correction,
    Draw,
    ExternalRule,
    Generate,
    Loss,
    Replay,
)
from node.methods.generation import Speculative
from node.methods.hints import Hints
from node.system.child_process import PASSPHRASE_VARIABLE
from swarm.errors import ConfigError
from swarm.peers.invite import Invitation
from swarm.wire.messages import ADDRESSES_MAX, COMPLETIONS_MAX

OVER_PROVISION_MAX = 4.0

PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]  # multiples of it are set as timers
OFTEN = Flag(often=True)
BY_NAME = Flag(metavar=METHOD)


class Group(Frozen):
    """Settings that belong together; the docstring is the title of the group."""

    model_config = ConfigDict(defer_build=True)  # `NodeConfig` alone validates


class PolicySettings(Group):
    """Run and policy."""

    run: Annotated[RunConfig, Flag(metavar="FILE", often=True)]
    """The rules that all nodes share: a run file, a packaged run, or a run's id."""
    model: Annotated[Name, Flag(metavar="MODEL", often=True)] = "tiny"
    """The policy to start from: `tiny`, `smollm2`, a directory in Hugging Face's format, a GGUF
    file, or the id of a model on the hub."""
    yes: Annotated[bool, OFTEN] = False
    """Agree beforehand to what the node would ask. It asks before it fetches a model, and before
    it uses plug-ins or the model that a run from a peer names."""
    lora_rank: Annotated[int, Field(ge=0, le=RANK_MAX), OFTEN] = 0
    """The rank of the adapter (LoRA) that is trained in place of the model. 0: the model
    itself is trained."""
    lora_alpha: Annotated[float, Field(gt=0, le=ALPHA_MAX)] | None = None
    """The adapter is scaled by alpha / rank. None: alpha is twice the rank."""
    lora_targets: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...],
        Listed,
        Field(max_length=TARGETS_MAX),
    ] = ()
    """The layers that get an adapter, such as `q_proj`. None: all of attention and MLP."""
    lora_base: Held = "bfloat16"
    """The precision of the frozen weights under an adapter. `bfloat16` takes two bytes for each,
    `float32` four. `4bit` takes half a byte in the adapted layers, by bitsandbytes, on an NVIDIA
    GPU alone. Factors, gradients and the optimizer's state stay in fp32. A worker that only loads
    adapters takes what its learner had, unless this is set."""
    threads: Annotated[int, Field(ge=0, le=1024), OFTEN] = 0
    """The threads of torch and of vLLM. 0: the cores divided by the running nodes of this user."""
    seed: Annotated[int, Field(ge=0, lt=2**63), OFTEN] = 0
    """The seed of this node's sampling."""


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
    """An invitation to a swarm; `-` reads it from standard input, which other users cannot see. It
    may hold the key to a private swarm, so it is never shown."""
    private: Annotated[bool, OFTEN] = False
    """Start a swarm that only those with an invitation can join."""
    listen: Annotated[
        tuple[ListenAddress, ...],
        Listed,
        Field(min_length=1, max_length=ADDRESSES_MAX),
        Flag(metavar="ADDR", often=True),
    ] = ("/ip4/0.0.0.0/tcp/0",)
    """The addresses on which the node accepts connections. Port 0 takes any free port,
    and after a restart the same one, if it is still free."""
    announce: Annotated[
        tuple[AnnounceAddress, ...], Listed, Field(max_length=ADDRESSES_MAX), Flag(metavar="ADDR")
    ] = ()
    """The addresses that others are told to dial, in place of those that the node can see
    itself. Set them where you forward a port by hand."""
    allow: Path | None = None
    """A file with the peer ids that the node talks to, one a line. It refuses all others."""
    relay: bool = True
    """Carry connections for peers that nobody can dial."""
    upnp: bool = True
    """Ask the router to forward the node's port."""
    dht: bool = True
    """Find peers of the run by the distributed hash table, and help others to find theirs. A
    private swarm never uses it."""
    lan: bool = True
    """Look for peers on the local network."""
    role: Annotated[Literal["worker", "node"], OFTEN] = "worker"
    """The node's part in a run that has a learner: work for it, or learn by itself."""
    coordinator: Annotated[PublisherId | None, Flag(metavar="PEER", often=True)] = None
    """The peer id of the coordinator that may plan this learner's workers."""
    share: Annotated[Literal["all", "none"], OFTEN] = "all"
    """Offer the node's own groups to others: all of them, or none."""


class GuestSettings(Group):
    """When and how much the node works."""

    busy_share: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """The share of its time that the node works; after a round it rests in between."""
    quiet_hours: Annotated[
        tuple[HoursText, ...], Listed, Field(max_length=16), Flag(metavar="HOURS")
    ] = ()
    """Local hours in which the node does nothing, such as 22:00-07:00."""
    pause_on_battery: bool = False
    """Do nothing while the machine runs on its battery."""
    tokens_per_s_max: PositiveSeconds | None = None
    """The rate at which a worker generates at most, in the mean. None: as fast as it can."""
    rounds: Annotated[Count | None, Flag(alias="steps", often=True)] = None
    """Stop after so many rounds, or steps of a learner. None: go on until interrupted."""
    stop_after_s: Annotated[PositiveSeconds | None, Flag("stop-after", often=True)] = None
    """Stop after so many seconds: evaluate, save and leave. None: go on until interrupted."""


class EngineSettings(Group):
    """Engine."""

    engine: Annotated[Literal["torch", "vllm", "openai", "scripted"], OFTEN] = "torch"
    """The engine that samples completions. `openai` is a model that the server at `engine_url`
    serves. The node then generates and shares; it trains nothing, and so draws no groups of others
    and evaluates nothing. `scripted` is for simulations."""
    engine_url: Annotated[ServerUrl | None, Flag(metavar="URL", often=True)] = None
    """The address of the server of the engine `openai`, up to and with `/v1`. The server is
    llama.cpp, Ollama, vLLM, SGLang, MLX or another that speaks OpenAI's interface."""
    engine_key_env: Annotated[Name | None, Flag(metavar="VARIABLE")] = None
    """The variable that holds the key of that server. None: it asks for none."""
    engine_prompts: Literal["chat", "text"] = "chat"
    """The form in which that server gets prompts: messages of a chat, or plain text, for models
    without a chat template."""
    engine_tokenizer: Annotated[Path | None, Flag(metavar="DIR")] = None
    """A directory with the tokenizer of the served model. With it, and at temperature 1, the node
    shares the server's log-probs, for nodes of the same tokenizer. None: its groups are texts
    alone."""
    engine_requests_max: Annotated[int, Field(ge=1, le=1024)] = 16
    """The number of completions that server is asked for at a time."""
    engine_update: Literal["keep", "drain", "abort"] = "keep"
    """The fate of unfinished completions of vLLM when new weights come. `keep` goes on with them
    under the new weights, `drain` finishes them first, `abort` begins them again."""
    engine_sleep: bool = True
    """Have vLLM give its memory back while the trainer works on the same GPU."""
    engine_gpu_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of a GPU's memory that vLLM takes. None: what the trainer leaves."""
    engine_gpus: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of GPUs of this machine over which vLLM cuts the policy (tensor parallel)."""
    engine_quantization: Quantisation = "none"
    """The quantisation of the policy's weights in vLLM. The trainer stays in full precision."""
    context_tokens_max: Annotated[int, Field(ge=CONTEXT_TOKENS_MIN)] | None = None
    """The length of a prompt and its completion together at most. None: as many as the model
    allows, at most 32,768. vLLM sets memory aside for them, and takes 4,096 and what the run lets a
    completion have unless this is set."""


class RoundSettings(Group):
    """Groups of a round."""

    local_groups: Annotated[int, Field(ge=0, le=1024), Flag("local", metavar="I", often=True)] = 4
    """I: the number of groups that the node generates in a round."""
    external_groups: Annotated[
        int, Field(ge=0, le=1024), Flag("external", metavar="J", often=True)
    ] = 4
    """J: the number of groups of others that the node draws for a round."""
    group_size: Annotated[int, Field(le=COMPLETIONS_MAX), Flag(metavar="G", often=True)] = 8
    """G: the number of completions of a task. It is at least 2 where the node generates groups."""
    over_provision: Annotated[float, Field(ge=1, le=OVER_PROVISION_MAX)] = 1.0
    """The number of groups that a round begins, in multiples of I. The round takes the first I
    that are done; the others go on in later rounds. It needs the engine `vllm`, or a run with
    turns."""
    foreign_share_max: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of J that one producer's groups may have, where others offer groups too."""
    control: Annotated[Control | None, BY_NAME] = None
    """The choice among the tasks ahead, by how often they were solved, here and by others: as in
    `vade, ahead=8`. It is for a node that learns by itself. None: each task as it comes.
    `swarm-node methods` lists them."""
    generate: Annotated[Generate | None, BY_NAME] = None
    """The beginnings of completions of tasks in common, at a node that learns by itself.
    `speculative` keeps what the policy would still say of the last ones and needs the engine
    `torch`. `hints` gives away the beginnings of others' right ones where the node mostly fails.
    Neither has turns. None: with nothing. `swarm-node methods` lists them."""
    draw: Annotated[Draw | None, BY_NAME] = None
    """The choice among others' groups, at a node that learns by itself. With `need` it draws a
    group the more often, the rarer it solves such tasks itself. None: all alike. `swarm-node
    methods` lists them."""
    external_rule: Annotated[ExternalRule | None, BY_NAME] = None
    """The rule for how many of others' groups a node that learns by itself draws. With
    `adaptive_external` it is none, some or all of J, by what each brought on the validation tasks.
    None: J. `swarm-node methods` lists them."""
    replay: Annotated[Replay | None, BY_NAME] = None
    """The completions of others that own groups take, at a node that learns by itself. With
    `rescue` groups that are all wrong take right ones of the same task. It needs tasks in common.
    None: nothing. `swarm-node methods` lists them."""


class TrainingSettings(Group):
    """Training."""

    learning_rate: Annotated[float | None, Field(gt=0, le=1), Flag(metavar="LR", often=True)] = None
    """The learning rate of Adam. None: what suits the policy, 1e-4 for a model up to 10 million
    parameters and for an adapter, 1e-5 up to 1 billion, 2e-6 above."""
    warm_up_updates: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """The number of updates in which the learning rate rises to full. None: what suits the policy,
    10, and none for a model up to 10 million parameters."""
    updates_per_batch: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of optimizer steps that the trainer takes on one batch."""
    clips_to_median: bool = True
    """Cut a gradient to three times the running median of the norms before it."""
    step_guard: bool = True
    """Take an update back that moves the policy far more than others did, and halve the rate for
    a while."""
    advantage: Annotated[Advantage, Flag(metavar=METHOD, often=True)] = Grpo()
    """The advantage of a completion over its group, by the name of a method, and what it is set
    to, as in `gapo, window_share=0.4`. `swarm-node methods` lists them."""
    loss: Annotated[Loss | None, Flag(metavar=METHOD, often=True)] = None
    """The loss that the trainer minimises, and what it is set to, as in `cispo, ratio_max=4`. None:
    the loss of the run, and where the run names none `sapo`, of a learner `dapo`. `swarm-node
    methods` lists them."""
    correction: Annotated[Correction | None, BY_NAME] = None
    """The importance weights of the loss `sapo` for tokens that came with log-probs, own and
    foreign ones, as in `icepop, weight_max=4`. None: foreign ones count up to twice. `swarm-node
    methods` lists them."""
    foreign_weighting: ForeignWeighting = "auto"
    """The weight of foreign tokens. `auto`: those of a node with the same tokenizer by the
    log-probs that came along; of the others, and of completions worse than their group, it leaves
    out unlikely tokens. `positives`: it leaves out completions worse than their group. `none`: it
    takes every text in full."""
    foreign_logprob_min: Annotated[float, Field(lt=0)] | None = None
    """Leave out foreign tokens whose log-prob under the own policy is below this. None: it leaves
    out none."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] | None = None
    """The number of tokens, prompts and padding included, that go through the model at a time in
    training. None: 16,384 on a GPU and 4,096 on a CPU, fewer where memory asks for it."""
    activation_checkpointing: Recomputing = "auto"
    """Keep the input of each layer alone and run the layer twice, which takes less memory and more
    time. `auto`: where memory asks for it."""


class SavingSettings(Group):
    """Evaluations and checkpoints."""

    evaluate_every_rounds: Annotated[
        int, Field(ge=0), Flag("evaluate-every", metavar="ROUNDS", often=True)
    ] = 10
    """The rounds from one evaluation on the held-out tasks to the next. 0: there are none."""
    validation_tasks: Annotated[int, Field(ge=0, le=2_000)] = 64
    """The number of validation tasks that each evaluation of a node that learns by itself has
    besides, by which `returns_to_best` decides. The node never trains on them by itself. 0: none,
    and it decides nothing."""
    returns_to_best: bool = True
    """Go back to the policy that did best on the validation tasks where two evaluations in a row
    are far below it, and halve the learning rate."""
    checkpoint_every_rounds: Annotated[
        Count | None, Flag("checkpoint-every", metavar="ROUNDS", often=True)
    ] = None
    """The rounds from one checkpoint to the next. None: as many as leave 2 % of the time to
    writing them; a model of 135 million parameters has 1.6 GB to write."""
    checkpoints_kept: Count = 2
    """The number of checkpoints that stay on the disk, beside that of the best policy."""
    publish_precision: Precision = "bfloat16"
    """The precision of a learner's published versions: `bfloat16`, which engines compute in and
    which small steps leave mostly unchanged, or `float32`. What it trains stays in fp32, and
    adapters go out in fp32."""


class FileSettings(Group):
    """Files and keys."""

    data_dir: Annotated[Path, Flag(metavar="DIR", often=True)] = Path("swarm-data")
    """The directory with everything that the node keeps: key, checkpoints, pool, address book,
    log."""
    cache_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """The directory of policies that were made on this machine. None: `swarm-node` in the user's
    cache."""
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
    # Of the packaged environments the dearest takes 0.02 s for 64 right answers and 0.2 s for the
    # worst 64 texts; the rest is margin for slow machines and for other environments.
    verify_cpu_s: PositiveSeconds = 2.0
    """The CPU time that scoring one foreign group may take. What takes longer counts against its
    sender."""
    verify_sandbox: Literal["auto", "landlock", "off"] = "auto"
    """The sandbox of what scores. `auto` confines it as far as this machine allows, and leaves a
    run whose environments are plug-ins or run code where that is no sandbox. `landlock` takes such
    a run where there are no user namespaces, too; its code opens none of your files, but sees their
    names and sizes. `off` confines nothing, for whoever trusts all that is installed and all that
    is sent."""
    verify_read: Annotated[tuple[Path, ...], Listed] = ()
    """Files and folders that plug-ins may read where they score, besides Python and packages."""


class WatchingSettings(Group):
    """Output and monitoring."""

    log: Annotated[Literal["text", "json"], OFTEN] = "text"
    """The form of what a node prints: lines for people, or one JSON object a line."""
    verbose: Annotated[bool, Flag(alias="v", often=True)] = False
    """Print what the network does as well: dials, refusals, who comes and goes."""
    report_to: Annotated[Literal["tensorboard", "wandb", "trackio"] | None, OFTEN] = None
    """A tracker of experiments to which each round's figures go."""
    report_project: Annotated[str, Field(min_length=1, max_length=128)] = "swarm-node"
    """The tracker's project."""
    telemetry: Annotated[BrokerUrl | None, Flag(metavar="URL", often=True)] = None
    """The MQTT broker that gets a report each interval: `mqtt[s]://[user@]host:port`."""
    telemetry_ca: Path | None = None
    """The certificates that vouch for a broker at `mqtts://`."""
    telemetry_interval_s: Annotated[float, Field(ge=0.5, le=60), Flag("telemetry-interval")] = 2.0
    """The time from one report to the next."""
    metrics_listen: Annotated[HostAndPort | None, Flag(metavar="HOST:PORT", often=True)] = None
    """The host and port at which Prometheus may ask for metrics."""
    web_names: Annotated[tuple[WebName, ...], Listed, Flag("web-name", metavar="NAME")] = ()
    """The names by which Prometheus may ask, beside IP addresses and this machine's own name."""


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
        """How many validation tasks a node that learns by itself has: none where it evaluates
        nothing."""
        return self.validation_tasks if self.evaluate_every_rounds else 0

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

    @model_validator(mode="before")
    @classmethod
    def _trains_nothing(cls, values: Any) -> Any:
        """A node without a trainer draws nothing and evaluates nothing, as its model never changes,
        whatever a run file has for all nodes."""
        if isinstance(values, dict) and values.get("engine") == "openai":
            return {**values, "external_groups": 0, "evaluate_every_rounds": 0}
        return values

    @property
    def hears_solutions(self) -> bool:
        """Whether the node keeps others' right completions of tasks in common."""
        return self.replay is not None or isinstance(self.generate, Hints)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_run()
        self._check_engine()
        self._check_server()
        self._check_groups()
        self._check_methods()
        self._check_generate()
        return self

    def _check_engine(self) -> None:
        if self.engine != "vllm":
            if self.engine_gpus > 1:
                raise Conflict("engine_gpus", "needs the engine vllm", "1")
            if self.engine_quantization != "none":
                raise Conflict("engine_quantization", "needs the engine vllm", "none")
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
        if self.generate is not None:
            raise Conflict("generate", "the engine openai begins nothing for it")
        if self.run.learner is not None and self.role == "worker":
            raise Conflict("role", "takes the learner's weights, which openai cannot", "node")

    def _check_run(self) -> None:
        run = self.run
        if self.invitation is not None and self.invitation.run_id != run.run_id:
            raise ConfigError(
                f"the invitation is to run {self.invitation.run_id}, but this is run "
                f"{run.run_id}: give the other's file with --run"
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
        run = self.run
        kinds = {(spec.name, spec.parameters) for spec in run.environments}
        if self.control is not None and len(kinds) == 1 and not run.common.share:
            raise Conflict(
                "control",
                f"nothing tells the tasks of run {run.name} apart: it has one environment, and "
                "none in common: give it common.share",
            )
        methods = (self.control, self.generate, self.draw, self.replay)
        used = next((each for each in methods if each is not None), None)
        if self.local_groups == 0 and used is not None:
            raise Conflict("local_groups", f"makes no groups for {used}", "4")
        hinting = self.generate if self.hears_solutions and self.replay is None else None
        fetching = self.replay or hinting or self.draw or self.external_rule
        if fetching is not None and self.external_groups == 0:
            raise Conflict("external_groups", f"fetches nothing for {fetching}", "4")
        if self.external_rule is not None:
            for name, usual in (("evaluate_every_rounds", "10"), ("validation_tasks", "64")):
                if not getattr(self, name):
                    raise Conflict(name, f"tells nothing to {self.external_rule}", usual)
        if self.replay is not None and run.has_turns:
            raise Conflict("replay", f"tasks of run {run.name} have turns, which are not replayed")
        if self.replay is not None and not run.common.share:
            told = f"nodes of run {run.name} never meet on one task: give it common.share"
            raise Conflict("replay", told)

    def _check_generate(self) -> None:
        run, drafts = self.run, isinstance(self.generate, Speculative)
        if self.generate is None:
            return
        if drafts and self.engine != "torch":
            raise Conflict("engine", f"generates nothing from drafts for {self.generate}", "torch")
        if run.has_turns:
            raise Conflict("generate", f"run {run.name} has tasks of several turns")
        if not run.common.share:
            told = f"run {run.name} has no tasks that come again: give it common.share"
            raise Conflict("generate", told)
        if drafts and run.sampling.top_p < 1.0:
            told = f"run {run.name} does not sample by the whole distribution: top_p must be 1"
            raise Conflict("generate", told)


class Conflict(Exception):
    """Fields that are right alone do not fit together; `fix` is a value that would."""

    def __init__(self, field: str, problem: str, fix: str | None = None) -> None:
        super().__init__(field, problem, fix)
        self.field = field
        self.problem = problem
        self.fix = fix


def rules_of(config: NodeConfig) -> LearnerRules:
    """The learner's rules of a run."""
    if config.run.learner is None:
        raise ConfigError(
            f"run {config.run.name} has no learner: put learner.peer into its file (swarm-node "
            "keygen prints the id of a key), or take part in it with swarm-node join"
        )
    return config.run.learner
