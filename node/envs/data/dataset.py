"""The environment `dataset`: the questions and answers of a run's founder, and their scorer.

A run file of one's own may name a `path`. When the run is read, the hash of the file's items
replaces the path; the hash is sent, and part of the run's id.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from node.envs.base import Problem, Undecided, checked, wrong_parameters
from node.envs.data import hub
from node.envs.data import items as store
from node.envs.data.items import Content, Item, Items, Judging, Rows, content_of
from node.envs.data.math_scorer import MathScorer
from node.envs.data.readers import read_rows
from node.envs.data.regex_scorer import RegexScorer
from node.envs.data.schema_scorer import JsonSchemaScorer
from node.envs.data.scorers import (
    LETTERS,
    NAMES,
    ChoiceScorer,
    ExactScorer,
    ItemScorer,
    NumericScorer,
    ScorerName,
)
from node.envs.data.shapes import Columns, found_in, messages_of, names_in
from node.interfaces.prompts import Prompt
from swarm.errors import ConfigError
from swarm.rollouts import Task

NAME: Final = "dataset"
FILES_REMEMBERED_MAX: Final = 16
RULES_CACHED_MAX: Final = 64
ROWS_LOOKED_AT: Final = 100  # for a shape
MARKED: Final = frozenset({"exact", "numeric", "choice", "math"})  # scorers of one final answer
SCORERS: Final[Mapping[ScorerName, type[ItemScorer]]] = {
    "exact": ExactScorer,
    "numeric": NumericScorer,
    "choice": ChoiceScorer,
    "math": MathScorer,
    "regex": RegexScorer,
    "json_schema": JsonSchemaScorer,
}
_Column = Annotated[str, Field(min_length=1, max_length=64)]
_Leave = Annotated[float, Field(ge=0)]


class DataRules(BaseModel):
    """One set of items and how it is scored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = ""
    question: _Column = "question"
    answer: _Column = "answer"
    choices: _Column | None = None
    rule: _Column | None = None
    scorer: ScorerName = "exact"
    engine: Annotated[str, Field(max_length=64)] = ""
    tolerance: _Leave | None = None
    relative_tolerance: _Leave | None = None
    ignore_case: bool | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> "DataRules":
        hints = {"scorer": f"write one of {', '.join(NAMES)}"}
        rules = checked(cls, parameters, NAME, more=("path",), hints=hints)
        for name in rules._settings:
            if name not in rules.judge.takes:
                raise _wrong(f"{name}: the scorer {rules.scorer} has no such setting; remove it")
        for use in rules.judge.needs:
            if getattr(rules, use) is None:
                raise _wrong(f"the scorer {rules.scorer} takes a column {use}; name it")
        if rules.rule is not None and "rule" not in rules.judge.needs:
            raise _wrong(f"rule: the scorer {rules.scorer} reads no such column; remove it")
        return rules

    @property
    def _settings(self) -> dict[str, float | bool]:
        names = ("tolerance", "relative_tolerance", "ignore_case")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @cached_property
    def judge(self) -> ItemScorer:
        """The scorer; ConfigError if its package is not installed."""
        return SCORERS[self.scorer](self._settings)

    @property
    def columns(self) -> Columns:
        return Columns(self.question, self.answer, self.choices, self.rule)

    def content(self, rows: Rows, name: str, columns: Columns | None = None) -> Content:
        """The items of rows, in these columns or those that the run names. Rows that the scorer
        cannot judge are left out; ConfigError if that leaves none."""
        self.judge.prepare()
        is_schema = self.scorer == "json_schema"
        judging = Judging(self._fault, self.scorer in MARKED, is_schema)
        return content_of(rows, columns or self.columns, name, judging)

    def _fault(self, item: Item) -> str | None:
        try:
            answer = self.judge.own_answer(item)
            if self.judge.score(item, answer) == 1.0:
                return None
        except ValueError as error:
            return str(error)
        except Undecided:
            return f"its own answer takes the scorer {self.scorer} too long"
        return f"its own answer does not pass the scorer {self.scorer}"

    def items(self) -> Items:
        """The items; ConfigError if they are not on this machine, or have other columns."""
        items = store.load(self.sha256)
        missing = set(self.columns.by_use().values()) - set(items.row(0))
        if missing:
            raise _wrong(f"its items have no column {min(missing)!r}; correct the run's columns")
        return items


@lru_cache(maxsize=RULES_CACHED_MAX)
def rules_of(parameters: str) -> DataRules:
    """The rules in a run's settled parameters."""
    return DataRules.of(json.loads(parameters))


def located(path: str, folder: Path) -> Path:
    """The file or folder of a path, or of a data set's id on the hub. A path begins in `folder`."""
    file = (folder / Path(path).expanduser()).absolute()
    return hub.fetched(path) if not file.exists() and hub.is_id(path) else file


def _kept_of(path: Any, folder: Path | None, rules: DataRules) -> "_Kept":
    if folder is None:
        raise _wrong("path: for a run file of one's own alone; rules that travel have sha256")
    if not isinstance(path, str) or not path:
        raise _wrong("path: must be a text")
    file = located(path, folder)
    kept = _read_once(file, _stamp(file), rules)
    if rules.sha256 not in ("", kept.sha256):
        raise _wrong(
            f"{file}: holds the items {kept.sha256[:12]}…, and this run has {rules.sha256[:12]}…; "
            "remove sha256 to found another run"
        )
    return kept


def _stamp(file: Path) -> tuple[tuple[str, int, int], ...]:
    """A value that changes with the file, or with a file in the folder."""
    try:
        inside = sorted(file.iterdir()) if file.is_dir() else [file]
        told = [(str(each), each.stat()) for each in inside]
    except OSError:
        return ()
    return tuple((name, each.st_size, each.st_mtime_ns) for name, each in told)


@lru_cache(maxsize=FILES_REMEMBERED_MAX)
def _read_once(file: Path, stamp: tuple[tuple[str, int, int], ...], rules: DataRules) -> "_Kept":
    del stamp
    reading = read_file(file, rules)
    return _Kept(store.keep_own(reading.content, told_of(file, reading)), reading.rules)


class _Kept(NamedTuple):
    sha256: str
    rules: DataRules  # with the columns' names in the store


class Reading(NamedTuple):
    """A user's file."""

    rules: DataRules  # as a run sends them
    columns: Columns  # in the file
    content: Content


def read_file(file: Path, rules: DataRules) -> Reading:
    """The items of a user's file; columns that the rules do not name are found by its shape.

    Raises:
        ConfigError: it cannot be read, is of no known shape, or no row is an item.
    """
    columns = rules.columns
    if not {"question", "answer"} & rules.model_fields_set:
        columns = _found(file, rules)
        if rules.scorer != "choice" and "scorer" in rules.model_fields_set:
            columns = replace(columns, choices=rules.choices)
        if columns.choices is not None and "scorer" not in rules.model_fields_set:
            rules = DataRules.of({**rules.model_dump(exclude_unset=True), "scorer": "choice"})
    content = rules.content(read_rows(file, columns), file.name, columns)
    named = {use: use for use in columns.by_use()}
    return Reading(rules.model_copy(update=named), columns, content)


def told_of(file: Path, reading: Reading) -> list[str]:
    """Lines about columns that were found, and a table of the rows that were left out, by reason;
    none if there is nothing to tell."""
    columns, content = reading.columns, reading.content
    told = []
    if columns.shape and any(use != path for use, path in columns.by_use().items()):
        used = ", ".join(f"{use} from {path}" for use, path in columns.by_use().items())
        told.append(f"{file.name}: columns found by {columns.shape}: {used}")
    return [*told, *store.left_out_lines(file.name, content.left_out, content.items)]


def _found(file: Path, rules: DataRules) -> Columns:
    rows = [row for _, row in islice(read_rows(file, None), ROWS_LOOKED_AT)]
    records = [row for row in rows if isinstance(row, Mapping)]
    found = found_in(records, rules.choices)
    if found is not None:
        return replace(found, rule=rules.rule)
    if not records or any({"question", "answer"} <= row.keys() for row in records):
        return rules.columns  # and each row is told to lack them
    raise _wrong(
        f"{file}: no columns of a known shape among {names_in(records)}; name them as question and "
        "answer"
    )


def _wrong(what: str) -> ConfigError:
    return wrong_parameters(NAME, what)


# An order of items that follows from a key, without a list: a Feistel network of four rounds over
# the smallest power of four that holds them, repeated until the number is below the count.

ROUNDS: Final = 4
_DOMAIN: Final = b"swarm/shuffle/1"


def shuffled(place: int, count: int, seed: int, epoch: int) -> int:
    """The number of the item at `place`, both from 0. For one seed and epoch each comes once. Takes
    about 10 µs for any `count`."""
    assert 0 <= place < count
    half = max(1, (max(1, count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(
        seed.to_bytes(8, "big") + epoch.to_bytes(8, "big"), key=_DOMAIN, digest_size=16
    ).digest()
    while True:  # the network has at most four times as many numbers as there are items
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mixed(key, turn, right) & mask)
        place = left << half | right
        if place < count:
            return place


def _mixed(key: bytes, turn: int, value: int) -> int:
    mixed = hashlib.blake2b(value.to_bytes(8, "big"), key=key, salt=bytes([turn]), digest_size=8)
    return int.from_bytes(mixed.digest(), "big")


# Raise it with each change of the items' order, a prompt or a reward: nodes of different revisions
# share nothing.
REVISION: Final = 2


class Dataset:
    """Items by their hash, scored by name. Parameters: path, sha256, question, answer, choices,
    rule, scorer, tolerance, relative_tolerance and ignore_case, which docs/data.md explains."""

    name = NAME
    version = f"dataset-r{REVISION}"

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
        """A run's parameters as they are sent, with the hash of the items and the scorer's version.
        `folder`: of the user's run file, where a path begins; None: the rules may name no path.

        Raises:
            ConfigError: they are wrong, or their file is unreadable or has another hash.
        """
        given = dict(parameters)
        path = given.pop("path", None)
        rules = DataRules.of(given)
        engine = rules.judge.engine
        if rules.engine not in ("", engine):
            raise _wrong(
                f"this run scores by {rules.engine}, installed is {engine or 'none'}; "
                "install that one"
            )
        if path is not None:
            sha256, rules = _kept_of(path, folder, rules)
            rules = rules.model_copy(update={"sha256": sha256})
        if not rules.sha256:
            raise _wrong("no items; name a file of them as path, or their hash as sha256")
        told = rules.model_copy(update={"engine": engine})
        always = {name: getattr(told, name) for name in ("sha256", "question", "answer", "scorer")}
        return told.model_dump(exclude_defaults=True) | always

    def reads(self, parameters: str) -> list[Path]:
        return [store.path_of(rules_of(parameters).sha256)]

    def problem(self, task: Task) -> Problem:
        rules = rules_of(task.parameters)
        items = rules.items()
        rules.judge.prepare()
        epoch, place = divmod(task.index, len(items))
        chosen = shuffled(place, len(items), task.seed, epoch)
        item = items.row(chosen)
        try:
            answer = rules.judge.own_answer(item)
        except ValueError as error:
            raise ConfigError(f"environment {NAME}: item {chosen + 1}: {error}") from None
        return Problem(task, prompt_of(item), answer, item)

    def score(self, problem: Problem, text: str) -> float:
        return rules_of(problem.task.parameters).judge.score(problem.entry, text)


def prompt_of(item: Item) -> str:
    """The question after its chat's earlier messages, and below it the choices, each after its
    letter, as `Prompt.text`."""
    asked = item["question"]
    prompt = Prompt.of(asked) if isinstance(asked, str) else Prompt(tuple(messages_of(asked)))
    choices = enumerate(item.get("choices", ()))
    shown = [f"{LETTERS[at]}. {text}" for at, text in choices]
    return prompt.asking("\n".join([prompt.question, *shown])).text
