"""Calendar arithmetic: name the date that lies N days after a given date."""

import random
import re
from datetime import date, timedelta

import verifiers.v1 as vf
from pydantic import Field, model_validator

SYSTEM_PROMPT = (
    "You answer questions about the Gregorian calendar. You may reason first. "
    "End with the date as YYYY-MM-DD inside <answer>...</answer> tags."
)

ANSWER_RE = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ISO_DATE_RE = re.compile(r"\d{4}-\d{2}-\d{2}")


def parse_answer(reply: str) -> date | None:
    """The date in the last pair of answer tags, or None if there is none."""
    found = ANSWER_RE.findall(reply)
    if not found:
        return None
    try:
        return date.fromisoformat(found[-1].strip())
    except ValueError:
        return None


class DateShiftData(vf.TaskData):
    """One question and its answer."""

    start: str
    """The date to count from, as YYYY-MM-DD."""
    days: int
    """How many days to count forward."""
    answer: str
    """The resulting date, as YYYY-MM-DD."""


class DateShiftTask(vf.Task[DateShiftData]):
    """Scores the date in the answer tags, and the use of the tags."""

    @vf.reward(weight=0.8)
    async def correct(self, trace: vf.Trace) -> float:
        """1.0 when the tagged date is the right one."""
        return float(parse_answer(trace.last_reply) == date.fromisoformat(self.data.answer))

    @vf.reward(weight=0.2)
    async def well_formed(self, trace: vf.Trace) -> float:
        """1.0 when the reply has exactly one answer, written as YYYY-MM-DD."""
        found = ANSWER_RE.findall(trace.last_reply)
        return float(len(found) == 1 and ISO_DATE_RE.fullmatch(found[0].strip()) is not None)

    @vf.metric
    async def reply_words(self, trace: vf.Trace) -> float:
        """Length of the reply in words."""
        return float(len(trace.last_reply.split()))

    @vf.metric
    async def answer_stats(self, trace: vf.Trace) -> dict[str, float]:
        """Whether a date was given and, if so, how many days it is off by."""
        given = parse_answer(trace.last_reply)
        if given is None:
            return {"answered": 0.0}
        off = abs((given - date.fromisoformat(self.data.answer)).days)
        return {"answered": 1.0, "days_off": float(off)}


class DateShiftConfig(vf.TasksetConfig):
    """Which questions to generate."""

    num_tasks: int = Field(100, ge=1)
    """How many questions to generate."""
    seed: int = 0
    """Seed of the generator. The same seed gives the same questions."""
    max_days: int = Field(400, ge=1)
    """Largest number of days to count forward."""
    first_year: int = Field(1950, ge=1)
    """Earliest year of a start date."""
    last_year: int = Field(2049, le=9000)
    """Latest year of a start date."""

    @model_validator(mode="after")
    def check_years(self) -> "DateShiftConfig":
        if self.first_year > self.last_year:
            raise ValueError("`first_year` must not be later than `last_year`")
        return self


class DateShiftTaskset(vf.Taskset[DateShiftTask, DateShiftConfig]):
    """Generated date questions."""

    def load(self) -> list[DateShiftTask]:
        rng = random.Random(self.config.seed)
        first = date(self.config.first_year, 1, 1).toordinal()
        last = date(self.config.last_year, 12, 31).toordinal()
        tasks = []
        for i in range(self.config.num_tasks):
            start = date.fromordinal(rng.randint(first, last))
            days = rng.randint(1, self.config.max_days)
            unit = "day" if days == 1 else "days"
            data = DateShiftData(
                name=f"date_shift_{i}",
                prompt=f"What date is {days} {unit} after {start.isoformat()}?",
                system_prompt=SYSTEM_PROMPT,
                start=start.isoformat(),
                days=days,
                answer=(start + timedelta(days=days)).isoformat(),
            )
            tasks.append(DateShiftTask(data, self.config.task))
        return tasks
