"""The parameters of the environment `dataset`: which items, what their columns are, which scorer.

A run file of one's own may name a `path`. When the run is read, the file is read too, and the path
gives way to the hash of its items: what travels, and what the run's id follows from, has no path.
"""

import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from node.environments.checked import checked, wrong_parameters
from node.environments.data import store
from node.environments.data.items import Columns, Content, Item, Items, Rows, content_of
from node.environments.data.readers import read_rows
from node.environments.data.scorers import NAMES, SCORERS, ItemScorer, ScorerName
from swarm.errors import ConfigError

NAME: Final = "dataset"
FILES_REMEMBERED_MAX: Final = 16
RULES_CACHED_MAX: Final = 64
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
        """
        Raises:
            ConfigError: one of them is wrong.
        """
        hints = {"scorer": f"write one of {', '.join(NAMES)}"}
        rules = checked(cls, parameters, NAME, more=("path",), hints=hints)
        rules._check_settings()
        return rules

    def _check_settings(self) -> None:
        for name in self._settings:
            if name not in self.judge.takes:
                raise _wrong(f"{name}: the scorer {self.scorer} has no such setting; remove it")
        for use in self.judge.needs:
            if getattr(self, use) is None:
                raise _wrong(f"the scorer {self.scorer} takes a column {use}; name it")
        if self.rule is not None and "rule" not in self.judge.needs:
            raise _wrong(f"rule: the scorer {self.scorer} reads no such column; remove it")

    @property
    def _settings(self) -> dict[str, float | bool]:
        names = ("tolerance", "relative_tolerance", "ignore_case")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @cached_property
    def judge(self) -> ItemScorer:
        """The scorer.

        Raises:
            ConfigError: what it takes is not installed.
        """
        return SCORERS[self.scorer](self._settings)

    @property
    def columns(self) -> Columns:
        """The columns of the items by their use."""
        return Columns(self.question, self.answer, self.choices, self.rule)

    def content(self, rows: Rows, name: str) -> Content:
        """The items of rows, each of which the scorer can judge.

        Raises:
            ConfigError: one line, for the first row that it cannot.
        """
        return content_of(rows, self.columns, name, self._fault)

    def _fault(self, item: Item) -> str | None:
        try:
            self.judge.own_answer(item)
        except ValueError as error:
            return str(error)
        return None

    def items(self) -> Items:
        """The items in memory.

        Raises:
            ConfigError: they are not on this machine, or have other columns.
        """
        items = store.load(self.sha256)
        missing = set(self.columns.by_use().values()) - set(items.row(0))
        if missing:
            raise _wrong(f"its items have no column {min(missing)!r}; correct the run's columns")
        return items


@lru_cache(maxsize=RULES_CACHED_MAX)
def rules_of(parameters: str) -> DataRules:
    """The rules in a run's parameters, of which a path was settled.

    Raises:
        ConfigError: as `DataRules.of`.
    """
    return DataRules.of(json.loads(parameters))


def settled(parameters: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """A run's parameters as they travel: with the hash of the items, and what scores. `folder`: of
    the run file, where a path begins; None: these rules are not from a file of the user's, and may
    name no path.

    Raises:
        ConfigError: they are wrong, the file cannot be read, or it holds other items than the hash
            says.
    """
    given = dict(parameters)
    path = given.pop("path", None)
    rules = DataRules.of(given)
    engine = rules.judge.engine
    if rules.engine not in ("", engine):
        raise _wrong(
            f"this run scores by {rules.engine}, installed is {engine or 'none'}; install that one"
        )
    sha256 = rules.sha256
    if path is not None:
        sha256 = _hash_at(path, folder, rules)
    if not sha256:
        raise _wrong("no items; name a file of them as path, or their hash as sha256")
    told = rules.model_copy(update={"sha256": sha256, "engine": engine})
    always = {name: getattr(told, name) for name in ("sha256", "question", "answer", "scorer")}
    return told.model_dump(exclude_defaults=True) | always


def _hash_at(path: Any, folder: Path | None, rules: DataRules) -> str:
    if folder is None:
        raise _wrong("path: for a run file of one's own alone; rules that travel have sha256")
    if not isinstance(path, str) or not path:
        raise _wrong("path: must be a text")
    file = (folder / Path(path).expanduser()).absolute()
    sha256 = _read_once(file, _stamp(file), rules)
    if rules.sha256 not in ("", sha256):
        raise _wrong(
            f"{file}: holds the items {sha256[:12]}…, and this run has {rules.sha256[:12]}…; "
            "remove sha256 to found another run"
        )
    return sha256


def _stamp(file: Path) -> tuple[tuple[str, int, int], ...]:
    """A value that changes when the file, or a file in the folder, changes."""
    try:
        inside = sorted(file.iterdir()) if file.is_dir() else [file]
        told = [(str(each), each.stat()) for each in inside]
    except OSError:
        return ()
    return tuple((name, each.st_size, each.st_mtime_ns) for name, each in told)


@lru_cache(maxsize=FILES_REMEMBERED_MAX)
def _read_once(file: Path, stamp: tuple[tuple[str, int, int], ...], rules: DataRules) -> str:
    del stamp
    return store.keep_own(rules.content(read_rows(file, rules.columns), file.name))


def _wrong(what: str) -> ConfigError:
    return wrong_parameters(NAME, what)
