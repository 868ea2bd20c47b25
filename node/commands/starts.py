"""Starts of nodes on this machine: those that were, and one that is only described."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from node.commands.doctor import check_model
from node.config import NodeConfig
from node.config.described import written
from node.config.errors import Source
from node.config.explain import explained
from node.config.joined import Start, starts_here
from node.hosting.models import resolved_model, trainer_spec
from node.interfaces.trainer_spec import TrainerSpec
from node.observe.event_log import FILE_NAME, read_events
from node.observe.records import HeldOut, RoundDone, StepDone, WorkDone
from node.observe.text_format import amount, percent, printable
from node.policies.presets import PRESETS
from swarm.errors import ConfigError

Say = Callable[[str], None]
VALUE_CHARS = 40  # of a setting in a comparison


def describe(
    config: NodeConfig, sources: Mapping[str, Source], say: Say, *, is_learner: bool
) -> None:
    """Say all settings of a start, what it would fetch, and the memory that it would take."""
    for line in explained(config, sources, is_learner=is_learner):
        say(line)
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
    """The figures of a start, as the event log has them."""

    rounds: int = 0
    held_out: float | None = None  # the last
    tokens: int = 0  # generated or trained on since the node's first start


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
        came = _came(each, found)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time_s))
        figures = str(came.rounds), percent(came.held_out), amount(came.tokens)
        rows.append((each.label, when, each.run_id.rpartition("-")[0], *figures, each.data_dir))
    _table(rows, say)
    return 0


def _named(found: Sequence[Start], name: str) -> Start:
    """The newest start of that name."""
    start = next((each for each in reversed(found) if each.label == name), None)
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
    first, second = _came(one, found), _came(other, found)
    rows.append(("rounds done", str(first.rounds), str(second.rounds)))
    rows.append(("held-out, last", percent(first.held_out), percent(second.held_out)))
    rows.append(("tokens", amount(first.tokens), amount(second.tokens)))
    _table(rows, say)


def _text(value: object) -> str:
    return "none" if value is None else printable(written(value), VALUE_CHARS)


def _table(rows: Sequence[tuple[str, ...]], say: Say) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        say("  ".join(cells).rstrip())


def _came(start: Start, found: Sequence[Start]) -> _Came:
    """The start's last figures: those in the log until the next start of its data directory."""
    after = [each.time_s for each in found if each.data_dir == start.data_dir]
    ends_s = min((each for each in after if each > start.time_s), default=float("inf"))
    rounds, held_out, tokens = 0, None, 0
    try:
        for time_s, record in read_events(Path(start.data_dir) / FILE_NAME):
            if not start.time_s <= time_s < ends_s:
                continue
            match record:
                case RoundDone():
                    rounds, tokens = record.round, record.generated_tokens_total
                case StepDone():
                    rounds, tokens = record.step, record.trained_tokens_total
                case WorkDone():
                    rounds, tokens = record.batch, record.generated_tokens_total
                case HeldOut():
                    held_out = record.passed
    except OSError:
        pass
    return _Came(rounds, held_out, tokens)
