"""When a node leaves its machine to its owner: between rounds, and never in the midst of one.

It stays in the swarm meanwhile, and serves what it has.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil
import trio

from node.system.hours import Hours
from node.system.machine import disk_free_bytes

PAUSED_FILE: Final = "paused"  # in the data directory; `swarm-node pause` puts it there
DISK_BYTES_MIN: Final = 268_435_456  # a checkpoint on a full disk would be the end of the node
LOOK_S: Final = 1.0
REST_S_MAX: Final = 3600.0


class Guest:
    """What the owner of the machine has asked for."""

    def __init__(
        self,
        data_dir: Path,
        quiet: Sequence[Hours] = (),
        *,
        pause_on_battery: bool = False,
        busy_share: float = 1.0,
        now: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        """`busy_share`: of its time that it works, above 0 and at most 1. `now`: local time."""
        self._data_dir = data_dir
        self._quiet = quiet
        self._pause_on_battery = pause_on_battery
        self._busy_share = busy_share
        self._now = now
        self._since_s: float | None = None  # it works

    def why(self) -> str | None:
        """Why it should do nothing now; None: it may work. Some microseconds of the disk's time."""
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
        """Until it may work. `tell`: what it waits for, whenever that is another thing."""
        now_s = trio.current_time()
        if self._busy_share < 1 and self._since_s is not None:
            rest_s = (now_s - self._since_s) * (1 / self._busy_share - 1)
            tell("resting")
            await trio.sleep(min(rest_s, REST_S_MAX))
        told = None
        while (why := self.why()) is not None:
            if why != told:
                tell(why)
                told = why
            await trio.sleep(LOOK_S)
        self._since_s = trio.current_time()
        await trio.lowlevel.checkpoint()


def _on_battery() -> bool:
    """False where that cannot be told, or there is none."""
    battery = psutil.sensors_battery()
    return battery is not None and battery.power_plugged is False
