"""Records of a node: the event log's lines and the answer to `swarm-node status`.

The event log is `events.jsonl` in the data directory: one JSON object a line, each with `event`
(the name below), `time_s` (unix time) and the fields of its record. Reports are made from it alone.
"""

from dataclasses import dataclass, field

from node.interfaces.trainer import LagFigures
from swarm.telemetry.metrics import RoundFigures
from swarm.transport.connection_slots import SlotFigures


@dataclass(frozen=True, slots=True)
class Started:
    """Event `started`: once for each start of the process."""

    peer_id: str
    run_id: str
    agent: str
    model: str
    parameters: int
    tokenizer: str
    engine: str
    round: int  # resumed from
    seed: int
    local_groups: int  # I
    external_groups: int  # J
    group_size: int  # G
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Counts of completions by the outcome of their answers."""

    completions: int
    unread: int  # without an answer of the run's format
    right: int
    cut: int  # by the token limit
    thoughts_cut: int = 0  # of these, before the end of their thought


@dataclass(frozen=True, slots=True)
class RoundDone(RoundFigures):
    """Event `round`: after each update. Totals count from the node's first start."""

    round: int
    policy_version: int
    own_reward: float  # mean over own completions of this round; foreign ones never enter
    local_groups: int  # own groups in the batch (effective I)
    external_groups: int  # foreign groups trained on (effective J)
    informative_groups: int  # of both, those with a non-zero advantage
    foreign_by_producer: dict[str, int]  # groups trained on in this round
    groups_shared: int
    generated_tokens: int
    generated_tokens_total: int
    trained_tokens_total: int
    generate_s: float
    score_s: float
    train_s: float
    loss: float
    grad_norm: float
    own_logprob: float
    foreign_logprob: float | None
    clip_fraction: float
    peers: int
    pool_groups: int
    pool_bytes: int
    accepted_total: int
    rejected_total: dict[str, int]  # by reason
    bytes_in_total: int
    bytes_out_total: int
    foreign_groups: tuple[str, ...] = ()  # ids of those trained on, hex, in the batch's order
    groups_quantised: int = 0  # of both, those that engines with quantised weights sampled
    step_kl: float | None = None  # how far the update moved the policy on its own batch: k3
    steps_taken_back: int = 0  # updates that moved it too far, and were undone
    rate_scale: float = 1.0  # the share of the rate that the next update takes, for caution
    unlikely_tokens: int = 0  # foreign tokens below the log-prob floor, left out of the update
    weighted_tokens: int = 0  # foreign tokens weighted by the log-probs that came with them
    rate_share: float = 1.0  # of the learning rate, by what evaluations showed (`loops.validation`)
    own_informative: int | None = None  # of `local_groups`; None: an older log does not say
    answers: AnswerCounts | None = None  # of all own completions of the round
    rescued_groups: int = 0  # own ones, all wrong, that took others' right completions
    hinted_groups: int = 0  # own ones whose completions began with others' beginnings
    hinted_taught: int = 0  # of these the informative ones that were trained on
    drafted_tokens: int = 0  # of earlier completions that this round's began with
    external_wanted: int | None = None  # what J was in this round; None: an older log
    foreign_gradient: float | None = None  # foreign share of the total |d loss / d log p|, 0 to 1
    kept_tokens: int = 0  # of `drafted_tokens`, those kept; not among `generated_tokens`
    acted: dict[str, int] = field(default_factory=dict)  # how often each method acted

    @property
    def own_taught(self) -> int:
        """Own groups whose rewards differ."""
        return self.local_groups if self.own_informative is None else self.own_informative


@dataclass(frozen=True, slots=True)
class StepDone:
    """Event `step`: after each step of a central learner. Totals count from its first start."""

    step: int
    version: int  # of the policy, after the step
    published_version: int  # the newest on offer
    groups: int  # trained on
    shared_groups: int  # of these, from the pool of shared rollouts
    informative_groups: int
    reward: float  # mean over the completions of leased groups
    staleness_mean: float  # over groups: steps from the oldest version of a token to this step
    staleness_max: int
    idle_s: float  # waited for groups
    train_s: float
    groups_by_worker: dict[str, int]
    buffered_groups: int  # after the step
    leased_groups: int  # in workers' hands
    discarded_total: dict[str, int]  # by reason
    trained_tokens_total: int
    loss: float
    grad_norm: float
    clip_fraction: float
    effective_share: float | None  # effective sample size of behaviour weights, over their number
    mismatch_k3: float | None  # KL from the policy that generated to the one before the step
    peers: int
    bytes_in_total: int
    bytes_out_total: int
    groups_quantised: int = 0  # of those trained on: by engines with quantised weights
    answers: AnswerCounts | None = None  # of the completions of leased groups
    step_kl: float | None = None  # this and the next two: see `RoundDone`
    steps_taken_back: int = 0
    rate_scale: float = 1.0
    acted: dict[str, int] = field(default_factory=dict)  # how often each method acted
    version_lag: float | None = None  # see `RoundFigures`
    by_lag: tuple[LagFigures, ...] = ()  # of groups, by their versions' age
    step_rate: float | None = None  # this and the next two as well
    completion_tokens_mean: float | None = None
    completion_tokens_max: float | None = None
    own_logprob: float | None = None  # mean log-prob per token of leased groups


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Event `work`: after each batch of a rollout worker. Totals count from this process' start."""

    batch: int
    policy_version: int  # that serves after it
    learner_version: int  # the newest heard of
    groups: int
    generated_tokens: int
    generated_tokens_total: int
    generate_s: float
    wait_s: float  # for the lease
    verdicts_total: dict[str, int]  # of the learner on groups handed in
    bytes_in_total: int = 0
    bytes_out_total: int = 0


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Event `published`: a learner put a version on offer."""

    version: int
    size_bytes: int
    full_bytes: int  # to fetch it whole
    delta_bytes: int | None  # to fetch the smallest delta; None: none is offered
    made_s: float  # to hash, cut, copy and announce it
    announced_ago_s: float  # when this was logged


@dataclass(frozen=True, slots=True)
class VersionSpreading:
    """Event `spreading`: workers of whom a learner learned that they have more of its version."""

    version: int
    shares: dict[str, float]  # of an artifact's chunks, 0 to 1, by peer
    using: tuple[str, ...]  # peers that asked for a lease with this version, or a newer one
    left_out: int  # workers beyond those that are watched


@dataclass(frozen=True, slots=True)
class VersionSpread:
    """Event `spread`: all peers that took part have a learner's version."""

    version: int
    peers: int
    spread_s: float  # since it was announced, or since the first peer came
    bound_s: float | None  # the least that their links allow; None: these are not known


@dataclass(frozen=True, slots=True)
class VersionComing:
    """Event `coming`: a worker enters a phase of getting a version."""

    peer_id: str
    version: int
    phase: str  # manifest, fetch, patch, load; dropped: a newer one came


@dataclass(frozen=True, slots=True)
class VersionCame:
    """Event `came`: what a worker's try to get a version came to."""

    peer_id: str
    version: int
    serving: int | None  # the version that serves now
    failure: str | None  # None: it serves
    fetch_s: float
    patch_s: float
    paused_s: float
    fetched_bytes: int
    saved_bytes: int  # against fetching it whole
    bound_s: float | None  # the least that the links allow for its chunks
    over_bound: float | None  # `fetch_s` over that


@dataclass(frozen=True, slots=True)
class SampledText:
    """One completion, as far as it is kept."""

    text: str
    answer: str | None  # what of it was scored; None: it has none of the run's format
    reward: float
    finish: str  # why it ended


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """Event `sampled`, in a log of its own: a group of a round."""

    round: int
    own: bool
    producer: str
    environment: str
    prompt: str
    texts: tuple[SampledText, ...]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Event `held_out`: an evaluation on the run's fixed held-out tasks."""

    round: int
    generated_tokens_total: int
    passed: float  # mean reward over tasks, in [0, 1]
    passed_by_environment: dict[str, float]
    tasks: int
    seconds: float
    validation: float | None = None  # the same on the node's validation tasks; None: it has none
    validation_tasks: int = 0
    examples: tuple[SampledGroup, ...] = ()  # the first tasks with their answers
    # Of each held-out task, in the run's order; None: left out. Empty: an older log.
    rewards: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class WentBack:
    """Event `went_back`: the policy was rolled back to the best one on the validation tasks."""

    round: int  # after which
    policy_version: int  # that the best policy has from now on
    passed: float  # validation pass rate of the policy that was left, in [0, 1]
    best: float  # and of this one
    best_round: int  # after which it was kept
    rate_share: float  # of the learning rate, from now on


@dataclass(frozen=True, slots=True)
class Trouble:
    """Event `trouble`: something a person may want to know; `what` says it in one sentence."""

    what: str


@dataclass(frozen=True, slots=True)
class StartEnded:
    """Event `ended`: a start is over. After a crash there is none."""

    failure: str | None  # None: the node was asked to leave, or its rounds are done


@dataclass(frozen=True, slots=True)
class Banned:
    """Event `banned`: a peer, or a block of addresses, is left alone for a while."""

    subject: str
    is_block: bool
    why: str
    until_s: float  # unix time
    number: int  # of the subject's bans, from 1


@dataclass(frozen=True, slots=True)
class BanStatus:
    """A ban that runs."""

    subject: str  # a peer id, or a block of addresses such as 192.0.2.0/24
    is_block: bool
    why: str
    seconds_left: float
    number: int


@dataclass(frozen=True, slots=True)
class PeerStatus:
    peer_id: str
    addresses: tuple[str, ...]
    agent: str
    groups_accepted: int
    groups_trained: int
    rejected: dict[str, int]
    groups_credited: int = 0  # of this node, that the peer says it trained on
    in_bytes_per_s: float = 0.0  # of the last half minute; gossip that is sent is not in it
    out_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StatusSnapshot(RoundFigures):
    """The answer to `swarm-node status`: the node at one moment. Figures are of the last round."""

    peer_id: str
    run_id: str
    agent: str
    model: str
    parameters: int
    engine: str
    uptime_s: float
    phase: str  # starting, generating, scoring, training, evaluating, saving, leaving
    round: int
    policy_version: int
    local_groups: int  # that taught something
    external_groups: int  # of the last round
    external_groups_wanted: int
    own_reward: float | None
    held_out_passed: float | None
    held_out_first: float | None
    tokens_per_s: float
    pool_groups: int
    pool_foreign: int  # groups of others that may still be drawn
    pool_bytes: int
    accepted: int
    rejected: dict[str, int]
    bytes_in: int
    bytes_out: int
    bytes_by_protocol: dict[str, tuple[int, int]]
    memory_bytes: int
    trainer_memory_bytes: int
    addresses: tuple[str, ...]
    peers: tuple[PeerStatus, ...] = field(default=())
    bans: tuple[BanStatus, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())  # alarms and hints, most urgent first
    pool_age_s: float | None = None  # of the oldest foreign group that may still be drawn
    link_model: str = ""  # the model that links and invitations name; empty: none
    precision: str = ""  # of the engine; empty: unsaid
    role: str = "node"  # or learner, or worker: a step or a batch is its round
    step: StepDone | None = None  # a learner's last
    work: WorkDone | None = None  # a worker's last
    staleness_bound: int | None = None  # S, of a run with a learner
    groups_quantised: int = 0  # of those last trained on: by engines with quantised weights
    door: SlotFigures | None = None  # who has the places for connections
    local_groups_made: int | None = None  # own groups of the last round's batch; None: unsaid
    foreign_gradient: float | None = None  # of the last round, see `RoundDone`
    sharing_per_token: float | None = None  # see `Usefulness`, 20 at most; None: too early
    answers: AnswerCounts | None = None  # of the last round or step
    credited_groups: int = 0  # own ones that others say they trained on, since the start
    credited_by: int = 0  # peers that say so
    credited_groups_ever: int = 0  # this and the next: since the node's first start
    credited_by_ever: int = 0
    validation_passed: float | None = None  # this and the next: see `loops.validation`
    validation_best: float | None = None
    validation_best_round: int = 0
    rate_share: float = 1.0
    returns: int = 0
