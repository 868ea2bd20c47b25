"""The rules by which each dataset of reasoning-gym is offered, or the reason why it is refused.

Each dataset was read line by line, except the generators in `rearc` and `gsm_symbolic`, for four
properties: (1) its scorer runs no code and has bounded time; (2) it reads the whole text, and no
wrong answer is worth 1; (3) all processes make the same problems; (4) in bounded time. Without
(1) or (2) a guard or scorer of `scorers` helps; without (3) or (4) the dataset is refused.

Beyond the notes: `propositional_logic` accepts a copied premise at complexity 2 and above, and
`Q∨P` with two variables at complexity 1. `fraction_simplification` gives 0.01 to any text, so runs
should have `reward = "exact"`. Items that cannot be made, or whose answer their own scorer refuses,
are drawn again, alike on all nodes.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import field
from importlib.resources import files
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from node.envs.gym import scorers
from node.envs.gym.scorers import Entry, Guard, Scorer

_NAMED: Final = BeforeValidator(lambda name: getattr(scorers, name))
Bounds = Mapping[str, int | float]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Rules:
    """The rules by which a dataset is offered. A scorer or guard is named as in `scorers`."""

    text_chars_max: PositiveInt = 1024  # longer answers score 0 unread
    guard: Annotated[Guard, _NAMED] | None = None  # texts for the dataset's own scorer; None: any
    scorer: Annotated[Scorer, _NAMED] | None = None  # instead of the dataset's
    note: str = ""  # fault of the library's scorer
    right: str = "example_answer"  # where an entry without an answer has one in its metadata
    settings_max: Bounds = field(default_factory=dict)  # above them it takes too long
    settings_min: Bounds = field(default_factory=dict)
    made_with: str = ""  # a package whose version decides the problems
    size: NonNegativeInt = 0  # its items are a list: each problem is the first of so many items
    is_shared: bool = False  # making it takes long, and its only state is the seed

    @property
    def scored_by(self) -> str:
        if self.scorer is not None:
            return "ours"
        return "the library's" if self.guard is None else "the library's, guarded"

    def answer(self, entry: Entry) -> str:
        answer = entry["answer"]
        found = entry["metadata"][self.right] if answer is None else answer
        return json.dumps(found) if isinstance(found, dict) else str(found).strip()


class DatasetTables(BaseModel, extra="forbid"):
    offered: Mapping[str, Mapping[str, Rules]]
    refused: Mapping[str, Mapping[str, str]]


def tables_of(text: str) -> DatasetTables:
    """The tables of a TOML file; an unknown key, function or kind of value fails."""
    return DatasetTables.model_validate(tomllib.loads(text))


_TABLES: Final = tables_of(files(__package__).joinpath("datasets.toml").read_text("utf-8"))
OFFERED_BY_GROUP: Final = _TABLES.offered
REFUSED_BY_GROUP: Final = _TABLES.refused
OFFERED: Final[Mapping[str, Rules]] = {
    name: rules for group in OFFERED_BY_GROUP.values() for name, rules in group.items()
}
REFUSED: Final[Mapping[str, str]] = {
    name: reason for group in REFUSED_BY_GROUP.values() for name, reason in group.items()
}
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    group: tuple(sorted(members)) for group, members in OFFERED_BY_GROUP.items()
}
