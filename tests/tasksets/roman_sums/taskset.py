"""Addition of Roman numerals, from a fixed list of problems."""

import json
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field

PROBLEMS = Path(__file__).parent / "problems.json"

SYSTEM_PROMPT = (
    "You add Roman numerals. Reply with the sum as a Roman numeral in capital "
    "letters and nothing else."
)


class RomanSumsData(vf.TaskData):
    """One problem and its answer."""

    terms: list[str]
    """The numerals to add."""
    answer: str
    """The sum as a Roman numeral."""


class RomanSumsTask(vf.Task[RomanSumsData]):
    """Scores an exact match with the expected numeral."""

    @property
    def key(self) -> str:
        """The id from the problem file, which does not depend on the task's position."""
        return self.data.id or self.hash

    @vf.reward(weight=1.0)
    async def exact_match(self, trace: vf.Trace) -> float:
        """1.0 when the whole reply is the expected numeral."""
        return float(trace.last_reply == self.data.answer)


class RomanSumsConfig(vf.TasksetConfig):
    """Which problems to load."""

    min_terms: int = Field(2, ge=2)
    """Leave out problems with fewer numerals to add."""
    max_terms: int | None = None
    """Leave out problems with more numerals to add. Unset keeps all."""


class RomanSumsTaskset(vf.Taskset[RomanSumsTask, RomanSumsConfig]):
    """The problems in `problems.json`."""

    def load(self) -> list[RomanSumsTask]:
        rows = json.loads(PROBLEMS.read_text(encoding="utf-8"))
        most = self.config.max_terms
        return [
            RomanSumsTask(
                RomanSumsData(
                    id=row["id"],
                    prompt=[
                        vf.SystemMessage(content=SYSTEM_PROMPT),
                        vf.UserMessage(content=" + ".join(row["terms"]) + " = ?"),
                    ],
                    terms=row["terms"],
                    answer=row["answer"],
                ),
                self.config.task,
            )
            for row in rows
            if len(row["terms"]) >= self.config.min_terms
            and (most is None or len(row["terms"]) <= most)
        ]
