"""Lines of (name, value) and tables that `status`, `top` and the live panel share. Pure."""

from collections.abc import Iterable, Sequence

from rich.console import JustifyMethod, OverflowMethod
from rich.table import Table
from rich.text import Text

from node.observe.records import PeerStatus, RoundDone, StatusSnapshot, StepDone, WorkDone
from node.observe.text_format import amount, bar_chart, counted, percent, printable, short_id
from node.observe.usefulness import times_text
from swarm.telemetry.metrics import figure_texts

REASONS_SHOWN = 3  # the most frequent reasons of refused groups
REASON = "because of"  # the column whose texts fold
TEXT_COLUMNS = ("runs", "role", "at", REASON)  # beside the first
VALUE_CHARS_MAX = 400
_AGES_SHOWN = 4  # of the fewest updates


def facts_table(facts: Iterable[tuple[str, str]], *, fold: bool = False) -> Table:
    """Names and values; a value is one line, unless it is folded."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, width=12 if fold else 10)
    table.add_column(no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    for name, value in facts:
        table.add_row(name, Text(printable(value, VALUE_CHARS_MAX)))
    return table


def rows_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left_out: int = 0) -> Table:
    """A table of bounded texts; the first column is of text. `left_out`: further rows, counted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for place, name in enumerate(columns):
        is_text = not place or name in TEXT_COLUMNS
        justify: JustifyMethod = "left" if is_text else "right"
        folds = name == REASON
        overflow: OverflowMethod = "fold" if folds else "ellipsis"
        table.add_column(name, justify=justify, no_wrap=not folds, overflow=overflow)
    limits = [200 if name == REASON else 40 for name in columns]
    for row in rows:
        table.add_row(*(Text(printable(*cell)) for cell in zip(row, limits, strict=True)))
    if left_out:
        table.add_row(Text(f"and {left_out} more", style="dim"))
    return table


PEER_COLUMNS = ("accepted", "trained on", "rejected", "out/s")  # after the peer's id


def peer_cells(peer: PeerStatus) -> tuple[str, ...]:
    """A peer's row: its id, then `PEER_COLUMNS`."""
    rejected = sum(peer.rejected.values())
    return (
        short_id(peer.peer_id),
        f"{peer.groups_accepted}",
        f"{peer.groups_trained}",
        f"{rejected}",
        amount(peer.out_bytes_per_s, "B"),
    )


def now_line(s: StatusSnapshot) -> str:
    """The node's phase, its round, step or batch, and its policy version."""
    version = f"policy version {s.policy_version}"
    if s.role == "learner":
        offered = f" ({s.step.published_version} on offer)" if s.step else ""
        return f"{s.phase}, step {s.round}, {version}{offered}"
    if s.role == "worker":
        learner = f" (the learner is at {s.work.learner_version})" if s.work else ""
        version = version if s.policy_version else "no policy yet"
        return f"{s.phase}, batch {s.round}, {version}{learner}"
    return f"{s.phase}, round {s.round}, {version}"


def guard_note(record: RoundDone | StepDone) -> str | None:
    """The step guard's last action, while it lowers the learning rate; None: there is none."""
    if not record.steps_taken_back and record.rate_scale >= 1.0:
        return None
    rate = f"it learns at {percent(record.rate_scale)} of its rate for a while"
    if not record.steps_taken_back:
        return f"the trainer took an update back some rounds ago; {rate}"
    moved = "" if record.step_kl is None else f" (by {record.step_kl:.2g} nats a token)"
    return f"an update moved the policy too far{moved} and was taken back; {rate}"


def done_lines(s: StatusSnapshot, rewards: Sequence[float] = ()) -> list[tuple[str, str]]:
    """The node's results by its role; a value has about 66 characters. `rewards`: those of the
    last rounds, drawn as bars."""
    if s.role == "worker":
        return work_lines(s.work, s.tokens_per_s)
    reward = "none yet" if s.own_reward is None else f"{s.own_reward:.3f}"
    lines = [
        ("held-out", _held_out(s)),
        *_validation_lines(s),
        (
            "reward" if s.role == "learner" else "own reward",
            f"{reward}  {bar_chart(rewards)}".rstrip(),
        ),
        *_answer_lines(s),
    ]
    if s.role == "learner":
        bound = "" if s.staleness_bound is None else f", {s.staleness_bound} allowed"
        return [*lines, *step_lines(s.step, bound), *_age_lines(s.step), *mismatch_lines(s)]
    return [
        *lines,
        *_trained_lines(s),
        *_sharing_lines(s),
        *mismatch_lines(s),
        ("generating", f"{s.tokens_per_s:,.0f} tokens/s"),
    ]


def _held_out(s: StatusSnapshot) -> str:
    if s.held_out_passed is None:
        return "not evaluated yet"
    if s.held_out_first is None:
        return f"{percent(s.held_out_passed)} passed"
    rise = 100 * (s.held_out_passed - s.held_out_first)
    first = percent(s.held_out_first)
    return f"{percent(s.held_out_passed)} passed, {first} at the start ({rise:+.1f} points)"


def _trained_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    """Groups of the last round, and of them those that taught something."""
    made = s.local_groups if s.local_groups_made is None else s.local_groups_made
    own = str(made) if made == s.local_groups else f"{s.local_groups} of {made}"
    if s.engine == "openai":
        return [("made", f"{own} groups")]
    wanted = f"{s.external_groups} of {s.external_groups_wanted} wanted from others"
    return [("trained on", f"{own} own groups, {wanted}{_quantised(s.groups_quantised)}")]


def pool_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    """Lines on shared rollouts, in which learners may and workers do not take part."""
    if s.role != "node" and not (s.pool_groups or s.accepted or s.rejected):
        return []
    size = amount(s.pool_bytes, "B")
    return [
        ("pool", f"{s.pool_groups} groups, {s.pool_foreign} of others, {size}"),
        ("from peers", f"{s.accepted} groups accepted, {sum(s.rejected.values())} rejected"),
    ]


def credit_text(s: StatusSnapshot) -> str:
    """The use that others made of the node's groups; empty: none that they told of."""
    if not s.credited_groups_ever:
        return ""
    ever = f"{_trained_by(s.credited_groups_ever, s.credited_by_ever)} since its first start"
    if not s.credited_groups:
        return ever
    if s.credited_groups == s.credited_groups_ever:
        return _trained_by(s.credited_groups, s.credited_by)
    return f"{_trained_by(s.credited_groups, s.credited_by)}; {ever}"


def credit_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    if s.role == "learner":  # it shares weights, and no groups
        return []
    return [("to others", credit_text(s) or "no peer has told yet that it trained on your groups")]


def _trained_by(groups: int, peers: int) -> str:
    were = "was" if groups == 1 else "were"
    return f"{groups:,} of your groups {were} trained on by {counted(peers, 'peers')}"


def step_lines(step: StepDone | None, bound: str = "") -> list[tuple[str, str]]:
    """A learner's last step. `bound`: on staleness, as text."""
    if step is None:
        return [("trained on", "nothing yet: it waits for its first groups")]
    workers = counted(len(step.groups_by_worker), "workers")
    shared = f" and {step.shared_groups} of the pool" if step.shared_groups else ""
    return [
        (
            "trained on",
            f"{counted(step.groups - step.shared_groups, 'groups')} of {workers}{shared},"
            f" {step.informative_groups} informative{_quantised(step.groups_quantised)}",
        ),
        (
            "staleness",
            f"{step.staleness_mean:.1f} steps in the mean, {step.staleness_max} at most{bound}",
        ),
        ("last step", f"waited {step.idle_s:.1f} s, trained {step.train_s:.1f} s"),
        (
            "groups",
            f"{step.buffered_groups} ready, {step.leased_groups} in workers' hands,"
            f" {sum(step.discarded_total.values())} discarded",
        ),
    ]


def _age_lines(step: StepDone | None) -> list[tuple[str, str]]:
    """The effective sample size of the last step's tokens by the age of their versions."""
    known = [each for each in step.by_lag if each.effective_share is not None] if step else []
    told = ", ".join(f"{each.effective_share:.2f} at {each.lag}" for each in known[:_AGES_SHOWN])
    return [("by age", f"effective samples, by updates since: {told}")] if told else []


def work_lines(work: WorkDone | None, tokens_per_s: float) -> list[tuple[str, str]]:
    if work is None:
        return [("handed in", "nothing yet")]
    verdicts = work.verdicts_total
    taken = verdicts.get("accepted", 0)
    refused = sorted(
        ((count, why) for why, count in verdicts.items() if why != "accepted" and count),
        key=lambda each: (-each[0], each[1]),
    )
    reasons = "".join(f", {count:,} {printable(why, 24)}" for count, why in refused[:REASONS_SHOWN])
    return [
        ("handed in", f"{counted(sum(verdicts.values()), 'groups')}, {taken:,} accepted{reasons}"),
        (
            "generating",
            f"{tokens_per_s:,.0f} tokens/s, {work.generated_tokens_total:,} tokens so far",
        ),
        (
            "last batch",
            f"{counted(work.groups, 'groups')} in {work.generate_s:.1f} s,"
            f" waited {work.wait_s:.1f} s for work",
        ),
    ]


def mismatch_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    """The mismatch between the engine's and the trainer's policy; none if not measured."""
    parts = figure_texts(s)
    return [("mismatch", ", ".join(parts))] if parts else []


def _answer_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    """Shares of the last completions by outcome; none without completions."""
    found = s.answers
    if found is None or not found.completions:
        return []
    parts = [f"{percent(found.right / found.completions)} of {found.completions} right"]
    if found.unread:
        parts.append(f"{percent(found.unread / found.completions)} without an answer")
    if found.cut:
        parts.append(f"{percent(found.cut / found.completions)} cut by the token limit")
    if found.thoughts_cut:
        parts.append(f"{percent(found.thoughts_cut / found.completions)} cut before </think>")
    return [("answers", ", ".join(parts))]


def _validation_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    """Validation pass rates and rollbacks; none before a validation."""
    if s.validation_passed is None:
        return []
    parts = [f"{percent(s.validation_passed)} passed"]
    if s.validation_best is not None:
        parts.append(f"best {percent(s.validation_best)} after round {s.validation_best_round}")
    if s.returns:
        parts.append(f"went back {counted(s.returns, 'times')}")
    if s.rate_share < 1.0:
        parts.append(f"rate × {s.rate_share:g}")
    return [("validation", ", ".join(parts))]


def _sharing_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    """The gain from foreign groups; none before it can be estimated."""
    parts = []
    if s.sharing_per_token is not None:
        parts.append(f"{times_text(s.sharing_per_token)} times the groups that teach for a token")
    if s.foreign_gradient:
        parts.append(f"{percent(s.foreign_gradient)} of the gradient")
    return [("sharing", ", ".join(parts))] if parts else []


def _quantised(groups: int) -> str:
    """Said after what was trained on, where engines with quantised weights made some of it."""
    return f", {groups} by quantised engines" if groups else ""
