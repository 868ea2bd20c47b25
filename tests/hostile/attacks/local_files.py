"""Attacks from the same machine: on a node's files, and on its status socket."""

import os
import socket
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import trio

from tests.hostile.attack import Assault, attack, paced
from tests.hostile.targets import status_socket

NOBODY = 65_534
OTHERS = 0o077
SLEEPERS = 64


def open_to_others(folder: Path) -> list[str]:
    """Files and directories of a data directory that its owner is not alone with."""
    found = []
    for path in [folder, *folder.rglob("*")]:
        with suppress(OSError):
            if not path.is_symlink() and path.stat().st_mode & OTHERS:
                found.append(str(path.relative_to(folder.parent)))
    return found


@attack("once", "looks at modes alone")
async def modes(assault: Assault) -> None:
    """The modes of all that a node keeps."""
    found = await trio.to_thread.run_sync(open_to_others, assault.data_dir)
    assault.spent.count("open to others: " + ", ".join(found)[:160] if found else "none is open")
    folder = stat.S_IMODE(assault.data_dir.stat().st_mode)
    inside = 0 if not folder & OTHERS else len(found)
    assault.claim("files that others may reach", inside, 0)


@attack("once", "three processes of another user, if we may start them")
async def another_user(assault: Assault) -> None:
    """Another user opens the key, the event log and the pool."""
    if os.geteuid() != 0:
        assault.spent.count("not tried: needs root")
        return
    reached = 0
    for name in ("identity.pem", "events.jsonl", "pool.sqlite"):
        reached += await trio.to_thread.run_sync(can_read, assault.data_dir / name)
    assault.claim("files that another user read", reached, 0)


def can_read(path: Path) -> bool:
    """Whether nobody can read a file."""
    done = subprocess.run(
        ["head", "-c", "1", str(path)],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, timeout=20, check=False,
    )  # fmt: skip
    return path.exists() and done.returncode == 0


@attack("20 a second", "64 clients at a time that read nothing")
async def status_unread(assault: Assault) -> None:
    """Clients of the status socket that ask and do not read."""
    path = status_socket(assault.data_dir)
    mode = stat.S_IMODE(path.stat().st_mode)
    assault.claim("mode of the status socket for others", mode & OTHERS, 0)
    clients: list[socket.socket] = []
    try:
        async for _ in paced(assault, 20.0):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            with suppress(OSError):
                client.connect(str(path))
                assault.spent.count("connected")
            clients.append(client)
            if len(clients) > SLEEPERS:
                clients.pop(0).close()
    finally:
        for client in clients:
            client.close()
