import re
from dataclasses import dataclass
from typing import Final, Self

MINUTES: Final = 24 * 60
_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Hours:
    """A range of minutes of the day, which may pass midnight."""

    begin: int
    end: int

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse `22:00-07:00`.

        Raises:
            ValueError: malformed.
        """
        found = _HOURS.fullmatch(text)
        if found is None:
            raise ValueError("must look like 22:00-07:00")
        hours = [int(each) for each in found.groups()]
        begin, end = 60 * hours[0] + hours[1], 60 * hours[2] + hours[3]
        if begin == end:
            raise ValueError("begins when it ends")
        return cls(begin, end)

    def has(self, minute: int) -> bool:
        """True if the minute of the day is in the range."""
        return (minute - self.begin) % MINUTES < (self.end - self.begin) % MINUTES

    def __str__(self) -> str:
        return f"{self.end // 60:02}:{self.end % 60:02}"
