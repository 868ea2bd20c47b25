"""When a node pauses for the machine's owner: between rounds only. It stays in the swarm and serves
meanwhile.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import psutil
import trio

from node.system.machine import disk_free_bytes

MINUTES: Final = 24 * 60
_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Hours:
    """A range of minutes of the day, which may pass midnight."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Self:
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


PAUSED_FILE: Final = "paused"  # in the data directory, made by `swarm-node pause`
DISK_BYTES_MIN: Final = 268_435_456  # room for a checkpoint
LOOK_S: Final = 1.0
REST_S_MAX: Final = 3600.0


class PauseRules:
    def __init__(
        self,
        data_dir: Path,
        quiet: Sequence[Hours] = (),
        *,
        pause_on_battery: bool = False,
        busy_share: float = 1.0,
        say: Callable[[str], None] = lambda _: None,
        now: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        """`busy_share`: of its time that it works, above 0 and at most 1. `say`: for people.
        `now`: local time."""
        self._data_dir = data_dir
        self._quiet = quiet
        self._pause_on_battery = pause_on_battery
        self._busy_share = busy_share
        self._say = say
        self._now = now
        self._since_s: float | None = None  # start of the current work

    def why(self) -> str | None:
        """Reason to pause. None: the node may work. Takes microseconds of disk time."""
        if (self._data_dir / PAUSED_FILE).exists():
            return "paused (swarm-node resume)"
        now = self._now()
        minute = 60 * now.tm_hour + now.tm_min
        for hours in self._quiet:
            if hours.has(minute):
                return f"quiet until {hours}"
        if self._pause_on_battery and _on_battery():
            return "waiting for mains power"
        free_bytes = disk_free_bytes(self._data_dir)
        if free_bytes is not None and free_bytes < DISK_BYTES_MIN:
            return "waiting for disk space"
        return None

    async def wait(self, tell: Callable[[str], None]) -> None:
        """Wait until the node may work. `tell` is called with each new reason."""
        now_s = trio.current_time()
        if self._busy_share < 1 and self._since_s is not None:
            rest_s = (now_s - self._since_s) * (1 / self._busy_share - 1)
            tell("resting")
            await trio.sleep(min(rest_s, REST_S_MAX))
        told = None
        while (why := self.why()) is not None:
            if why != told:
                tell(why)
                self._say(f"no work for now: {why}")
                told = why
            await trio.sleep(LOOK_S)
        if told is not None:
            self._say("at work again")
        self._since_s = trio.current_time()
        await trio.lowlevel.checkpoint()


def _on_battery() -> bool:
    """False if unknown or without battery."""
    battery = psutil.sensors_battery()
    return battery is not None and battery.power_plugged is False
