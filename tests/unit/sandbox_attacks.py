"""What code from anywhere may try where it is scored; each one succeeds where nothing confines it.

`python -m tests.unit.sandbox_attacks CELL FOLDER PORT` tries them all in a process of its own, and
prints what succeeded. CELL: `all` layers, all but `view` or `landlock`, or `none`.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from node.envs.base import Problem
from node.sandbox import confinement, landlock, namespaces
from swarm.rollouts import Task

SECRET_VARIABLE = "SWARM_TEST_TOKEN"


class Mole:
    """Runs what a text says, in hex, in the process that scores it; a full score if it succeeds."""

    name = "mole"
    version = "1"

    def problem(self, task: Task) -> Problem:
        return Problem(task, "?", "", {})

    def score(self, problem: Problem, text: str) -> float:
        exec(bytes.fromhex(text).decode(), {})
        return 1.0


def attacks(folder: Path, port: int) -> Mapping[str, str]:
    """Code that raises where it does not succeed. `folder` holds `node/key`, `node/socket`, on
    which somebody listens as on the port, and `path`, from which modules are imported."""
    where = f"import os, socket, ctypes, resource\nfolder, port = {str(folder)!r}, {port}\n"
    libc = "libc = ctypes.CDLL(None, use_errno=True)\n"
    # A file that it may read, by descriptor; each change leaves it as it is.
    own = f"import fcntl\nown = os.open({str(Path(__file__))!r}, os.O_RDONLY)\n"
    flags = "flags = fcntl.ioctl(own, 0x80086601, bytes(8))\n"  # FS_IOC_GETFLAGS
    tried = {
        "read the node's key": "open(folder + '/node/key').read()",
        "change its mode": "os.chmod(folder + '/node/key', 0o644)",
        "empty it": "os.truncate(folder + '/node/spare', 0)",
        "list the data directory": "os.listdir(folder + '/node')",
        "write beside it": "open(folder + '/node/note', 'w').write('x')",
        "list home": "os.listdir(os.path.expanduser('~root'))",
        "read the parent's memory map": "open(f'/proc/{os.getppid()}/maps').read(1)",
        "read the parent's environment": "open(f'/proc/{os.getppid()}/environ').read(1)",
        "connect by TCP": "socket.create_connection(('127.0.0.1', port), 1)",
        "send by UDP": ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))"),
        "connect to the node's socket": (
            "socket.socket(socket.AF_UNIX).connect(folder + '/node/socket')"
        ),
        "listen": "socket.create_server(('127.0.0.1', 0))",
        "fork": "os.fork() or os._exit(0)",
        "start a program": "os.posix_spawn('/bin/sh', ['sh', '-c', 'exit'], {})",
        "plant a module": "open(folder + '/path/sitecustomize.py', 'w').write('')",
        "plant a test's file": "open(folder + '/path/conftest.py', 'w').close()",
        "reach the parent by a signal": "os.kill(os.getppid(), 0)",
        "reach its group by a signal": "os.killpg(os.getpgrp(), 0)",
        "trace the parent": (
            f"{libc}if libc.ptrace(0x4206, os.getppid(), 0, 0):\n    raise OSError('no')"
        ),
        "look at the parent's limits": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
        "leave the process group": "os.setpgid(0, 0)",
        "share memory beyond limits": "os.memfd_create('x')",
        "change the mode of what it reads": f"{own}os.fchmod(own, os.fstat(own).st_mode & 0o7777)",
        "change the owner of what it reads": f"{own}os.fchown(own, -1, -1)",
        "leave a note on what it reads": (
            f"{own}os.setxattr(own, 'user.note', b'x')\nos.removexattr(own, 'user.note')"
        ),
        "remove a note": (
            f"{own}try:\n    os.removexattr(own, 'user.none')\n"
            "except OSError as error:\n    if error.errno != 61:\n        raise"
        ),
        "change the flags of what it reads": f"{own}{flags}fcntl.ioctl(own, 0x40086602, flags)",
        "change the times of what it reads": f"{own}os.utime(own)",
        "hint at its use": f"{own}fcntl.fcntl(own, 1036, (0).to_bytes(8, 'little'))",
        "lease what it reads": (
            f"{own}fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)\n"
            "fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_UNLCK)"
        ),
        "have a namespace": (f"{libc}if libc.unshare(0x10000000):\n    raise OSError('no')"),
    }
    return {name: where + code for name, code in tried.items()}


def main() -> None:
    cell, folder, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

    def is_missing(*arguments: object) -> int:
        raise OSError("left out")

    if cell == "view":
        namespaces.enter = is_missing
    if cell == "landlock":
        landlock.confine = is_missing
    layers = confinement.NONE
    if cell != "none":
        layers = confinement.confine(confinement.view_of_python([folder / "node", Path.home()]))
        confinement.lock()
    done = []
    for name, code in attacks(folder, port).items():
        try:
            exec(code)
            done.append(name)
        except OSError:
            continue
    there = [layers.view, layers.landlock, layers.calls]
    json.dump({"succeeded": done, "layers": there}, sys.stdout)


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    main()
