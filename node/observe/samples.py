"""The last rollouts of a node in `samples.jsonl`, an event log that `swarm-node samples` shows."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from node.observe.event_log import EventLog, read_events
from node.observe.records import SampledGroup, SampledText
from node.observe.text_format import short_id
from swarm.errors import ConfigError
from swarm.texts import printable

FILE_NAME: Final = "samples.jsonl"
FILE_BYTES_MAX: Final = 2 * 1024 * 1024
GROUPS_MAX: Final = 8  # of one round, own and foreign each
TEXTS_MAX: Final = 16  # of one group
EXAMPLES: Final = 4  # tasks of an evaluation that are kept with their answers
TEXT_CHARS_MAX: Final = 2000  # beginning and end; what is between is left out
SHOWN_CHARS_MAX: Final = 4 * TEXT_CHARS_MAX  # with escapes

Order = Literal["newest", "best", "worst"]


def sample_log(data_dir: Path, clock: Callable[[], float]) -> EventLog:
    """The log of a data directory, for a node to write."""
    return EventLog(data_dir / FILE_NAME, clock, bytes_max=FILE_BYTES_MAX)


def keep(log: EventLog, groups: Iterable[SampledGroup]) -> None:
    """Write some of a round's groups. Blocking.

    Raises:
        OSError: as `EventLog.write`.
    """
    for group in groups:
        log.write(group)


def shortened(text: str) -> str:
    """A text of at most `TEXT_CHARS_MAX` characters, from its beginning and its end."""
    half = TEXT_CHARS_MAX // 2
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: half - 1]}…{text[-half:]}"


def bounded(groups: Iterable[SampledGroup]) -> list[SampledGroup]:
    return list(groups)[:GROUPS_MAX]


@dataclass(frozen=True, slots=True)
class ReadSample:
    """One completion with its group and when it was made or came."""

    time_s: float
    group: SampledGroup
    text: SampledText
    times: int = 1  # that it is in its group


def read_samples(data_dir: Path, *, own: bool, order: Order, count: int) -> list[ReadSample]:
    """The newest completions, or those with the highest or lowest rewards, newer ones first. Equal
    ones of a group are one. `own`: of the node, or of others where it made none.

    Raises:
        ConfigError: nothing is kept there.
    """
    path = data_dir / FILE_NAME
    if not path.exists():
        raise ConfigError(
            f"--data-dir {data_dir}: no samples; name a node's, after its first round"
        )
    events: Iterable[tuple[float, object]] = read_events(path)
    groups = [(at, each) for at, each in events if isinstance(each, SampledGroup)]
    if own and not any(each.own for _, each in groups):
        own = False  # a learner has what its workers made
    found = [
        ReadSample(time_s, group, text, times)
        for time_s, group in groups
        if group.own is own
        for text, times in Counter(group.texts).items()
    ][::-1]
    if order != "newest":
        found.sort(key=lambda sample: sample.text.reward, reverse=order == "best")
    return found[:count]


def render_samples(samples: Sequence[ReadSample]) -> str:
    """For a terminal. All texts may be strangers'; what is not printable is escaped."""
    return "\n\n".join(map(_rendered, samples)) or "none kept"


def _rendered(sample: ReadSample) -> str:
    group, text = sample.group, sample.text
    who = "own" if group.own else f"of {short_id(group.producer)}"
    answer = "none in the run's format" if text.answer is None else _shown(text.answer)
    cut = ", cut by the token limit" if text.finish == "length" else ""
    often = f", said {sample.times} times" if sample.times > 1 else ""
    return "\n".join(
        (
            f"round {group.round}, {printable(group.environment, 64)}, {who}: "
            f"reward {text.reward:.3g}{cut}{often}",
            f"  prompt      {_shown(group.prompt)}",
            f"  completion  {_shown(text.text)}",
            f"  answer      {answer}",
        )
    )


def _shown(text: str) -> str:
    """In marks, so that blanks at its ends are seen."""
    return f"«{printable(text, SHOWN_CHARS_MAX, escapes=True)}»"
