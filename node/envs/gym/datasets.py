"""The rules by which each dataset of reasoning-gym is offered, or the reason why it is refused.

They are in `datasets.toml`. Each dataset was read line by line, except the generators in `rearc`
and `gsm_symbolic`, for four properties: (1) its scorer runs no code and has bounded time; (2) it
reads the whole text, and no wrong answer is worth 1; (3) all processes make the same problems; (4)
in bounded time. Without (1) or (2) a guard or scorer of `scorers` helps; without (3) or (4) the
dataset is refused.

Beyond the notes: `propositional_logic` accepts a copied premise at complexity 2 and above, and
`Q∨P` with two variables at complexity 1. `fraction_simplification` gives 0.01 to any text, so runs
should have `reward = "exact"`. Items that cannot be made, or whose answer their own scorer refuses,
are drawn again, alike on all nodes.
"""

import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from inspect import signature
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from node.envs.gym import scorers
from node.envs.gym.scorers import Entry, Guard, Scorer


def _of_scorers(arguments: int) -> BeforeValidator:
    """Finds the function of `scorers` with that name and so many arguments."""

    def find(name: str) -> object:
        found = vars(scorers).get(name)
        if not callable(found) or len(signature(found).parameters) != arguments:
            raise ValueError(f"no function of {arguments} arguments in scorers.py")
        return found

    return BeforeValidator(find)


class Rules(BaseModel):
    """The rules by which a dataset is offered: a row of `datasets.toml`, which explains them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text_chars_max: Annotated[int, Field(gt=0)] = 1024
    guard: Annotated[Guard | None, _of_scorers(3)] = None
    scorer: Annotated[Scorer | None, _of_scorers(2)] = None
    note: str = ""
    answer_at: str = ""
    settings_max: Mapping[str, int | float] = {}
    settings_min: Mapping[str, int | float] = {}
    made_with: str = ""
    size: int = 0
    is_shared: bool = False

    @property
    def scored_by(self) -> str:
        if self.scorer is not None:
            return "ours"
        return "the library's" if self.guard is None else "the library's, guarded"

    def answer(self, entry: Entry) -> str:
        """A right answer; datasets with several have an example in the metadata."""
        answer, metadata = entry["answer"], entry["metadata"]
        if self.answer_at:
            found = metadata[self.answer_at]
            return found if isinstance(found, str) else json.dumps(found)
        return str(metadata["example_answer"] if answer is None else answer).strip()


class DatasetTable(BaseModel):
    """A table of all datasets, read from TOML. ValueError: a row is wrong; KeyError: no such kind
    of row."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kinds: dict[str, dict[str, Any]]
    offered: dict[str, dict[str, dict[str, Any]]]
    refused: dict[str, dict[str, str]]  # reasons by group and name

    def rules(self) -> dict[str, dict[str, Rules]]:
        """The rules of the datasets on offer, by group and name."""
        return {
            group: {name: self._rules(**row) for name, row in rows.items()}
            for group, rows in self.offered.items()
        }

    def _rules(self, like: str = "", **row: Any) -> Rules:
        return Rules(**(self.kinds[like] if like else {}) | row)


_TEXT: Final = files(__package__).joinpath("datasets.toml").read_text("utf-8")
_TABLE: Final = DatasetTable(**tomllib.loads(_TEXT))
OFFERED_BY_GROUP: Final[Mapping[str, Mapping[str, Rules]]] = _TABLE.rules()
REFUSED_BY_GROUP: Final[Mapping[str, Mapping[str, str]]] = _TABLE.refused
OFFERED: Final[Mapping[str, Rules]] = {
    name: rules for group in OFFERED_BY_GROUP.values() for name, rules in group.items()
}
REFUSED: Final[Mapping[str, str]] = {
    name: reason for group in REFUSED_BY_GROUP.values() for name, reason in group.items()
}
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    group: tuple(sorted(members)) for group, members in OFFERED_BY_GROUP.items()
}
