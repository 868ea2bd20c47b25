"""What is left of a process group."""

import os
import threading

import psutil

WAIT_S = 30.0
PAUSE_S = 0.05


def pause() -> None:
    """A short wait for another process, outside trio."""
    threading.Event().wait(PAUSE_S)


def members(group: int) -> list[int]:
    """The processes of a group that run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def gone(group: int) -> bool:
    """Whether the whole group ends within `WAIT_S`."""
    for _ in range(int(WAIT_S / PAUSE_S)):
        if not members(group):
            return True
        pause()
    return False
