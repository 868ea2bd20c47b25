"""Confine the scoring process with all that the machine offers.

Three independent layers of Linux, each used if available:

  view      a root, network and System V memory of its own (`namespaces`)
  Landlock  only the view's files, where containers refuse namespaces (`landlock`)
  calls     no sockets, processes, limits or signals of others (`seccomp`)

Calls and view together are a sandbox for any code. With Landlock alone, code sees names, sizes and
times of the user's files, so the user must permit it (`Trust`). Less than that is for reviewed
scorers only.

No dependency does this: bubblewrap needs a program outside pip and namespaces, and confines a
program, not a process after its imports. PyPI's bindings for Landlock and seccomp are development
releases or need libseccomp.
"""

import ctypes
import fcntl
import json
import os
import resource
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final, Literal

from node.sandbox import kernel, landlock, namespaces, seccomp

SCRATCH_BYTES: Final = 16 * 2**20  # counts as memory
OPEN_FILES_MAX: Final = 64
FIND_TIMEOUT_S: Final = 30.0
_SYSTEM: Final = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
    "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip
_DEVICES: Final = (Path("/dev/null"),)  # writable
_IMPORTABLE: Final = (".py", ".pth", ".dist-info", ".egg-info", ".zip", *EXTENSION_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Layers:
    view: bool = False
    landlock: int = 0  # revision; 0: none
    calls: bool = False
    seatbelt: bool = False  # of macOS, untested

    @property
    def is_sandbox(self) -> bool:
        return self.suffice("auto")

    def suffice(self, trust: "Trust") -> bool:
        """True if any code may run in it at this level of trust."""
        if trust == "off":
            return True
        return self.calls and (self.view or (trust == "landlock" and self.landlock > 0))

    @property
    def brought(self) -> list[str]:
        """The layers in words."""
        told = {
            "namespaces: only what scorers read is there, read-only, with a scratch folder of "
            f"{SCRATCH_BYTES // 2**20} MiB and no network": self.view,
            f"Landlock {self.landlock}: no file but those, and no TCP": self.landlock > 0,
            "seccomp: no sockets, no new processes, no signals to others": self.calls,
            "seatbelt, untested: no network, nothing written": self.seatbelt,
        }
        return [words for words, is_there in told.items() if is_there]


NONE: Final = Layers()
Trust = Literal["auto", "landlock", "off"]
"""Places where code may run: in a view of its own; or with Landlock alone, which hides the content
of the user's files but not names, sizes and times; or anywhere."""
NEEDED: Final = (
    "its environments need a sandbox, and this machine has none; take Linux with user "
    'namespaces on x86-64 or ARM, or set verify_sandbox = "landlock" to do with Landlock alone '
    '(Linux 5.13), where such code sees names and sizes of your files, or "off" to trust all'
)


@dataclass(frozen=True, slots=True)
class VisiblePaths:
    """Paths that a confined process may read or list, and paths hidden from it."""

    read: tuple[Path, ...]
    listed: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    scratch: bool = True


def view_of_library(library: Iterable[Path]) -> VisiblePaths:
    """The standard library only, nothing writable."""
    read = [*map(Path, (*_SYSTEM, *_libraries())), *library]
    spelled = (each for path in read for each in (path, path.resolve()))
    return VisiblePaths(tuple(dict.fromkeys(spelled)), scratch=False)


def view_of_python(hidden: Iterable[Path], more: Iterable[Path] = ()) -> VisiblePaths:
    """The files that this interpreter and its packages need, and `more`. Of an import folder with
    hidden content, only importable files."""
    apart = tuple({spelled for each in hidden for spelled in (each.absolute(), each.resolve())})
    own = Path(__file__).parents[2]  # an editable install
    packages = (own / "node", own / "swarm")
    read = [*map(Path, (*_SYSTEM, *_libraries())), *packages, *more]
    listed: list[Path] = []
    for place in (
        Path(each or ".").absolute() for each in (sys.prefix, sys.base_prefix, *sys.path)
    ):
        if any(each.is_relative_to(place) for each in apart):
            listed.append(place)
            read += _importable(place, apart)
        else:
            read.append(place)
    spelled = (each for path in read for each in (path, path.resolve()))
    return VisiblePaths(tuple(dict.fromkeys(spelled)), tuple(listed), apart)


def _libraries() -> list[str]:
    """Files mapped into this process."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        named = [words[5] for line in lines if len(words := line.split(maxsplit=5)) == 6]
        return sorted({each for each in named if each.startswith("/")})  # not [heap] etc.
    return []


def _importable(folder: Path, apart: Iterable[Path]) -> list[Path]:
    """Modules and packages in a folder with other content."""
    with suppress(OSError):
        return [
            each
            for each in folder.iterdir()
            if not any(other.is_relative_to(each) for other in apart)
            and (each.name.endswith(_IMPORTABLE) or (each / "__init__.py").is_file())
        ]
    return []


def confine(view: VisiblePaths) -> Layers:
    """Confine this single-threaded process and its children, as far as the machine allows."""
    if sys.platform == "darwin":
        return Layers(seatbelt=_apply_seatbelt(view.hidden))
    has_view = has_calls = False
    revision = 0
    with suppress(OSError):
        namespaces.enter(view.read, SCRATCH_BYTES if view.scratch else 0)
        has_view = True
    with suppress(OSError):
        kernel.give_up_privileges()
        write = (*_DEVICES, *((namespaces.SCRATCH,) if has_view and view.scratch else ()))
        with suppress(OSError):
            revision = landlock.confine(view.read, view.listed, write)
        seccomp.confine(metadata=has_view)
        has_calls = True
    return Layers(has_view, revision, has_calls)


def limit(memory_bytes: int | None = None) -> None:
    """Limit a process. `memory_bytes`: total address space."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (SCRATCH_BYTES, SCRATCH_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_MAX, OPEN_FILES_MAX))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def lock(memory_bytes: int | None = None, *, alone: bool = False) -> None:
    """Leave a confined process, which may have threads, only computing and waiting. `alone`: only
    computing, in one thread."""
    limit(memory_bytes)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    if alone:
        seccomp.restrict_to_computing()
    else:
        seccomp.lock()


def found() -> Layers:
    """Layers of this machine, tried in a child process."""
    with suppress(OSError, subprocess.SubprocessError, ValueError, TypeError):
        done = subprocess.run(
            [sys.executable, "-m", "node.sandbox.confinement"],
            capture_output=True, timeout=FIND_TIMEOUT_S, check=True,
            env={"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)},
        )  # fmt: skip
        return Layers(**json.loads(done.stdout))
    return NONE


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(confine(view_of_python(())))))


def _apply_seatbelt(hidden: Iterable[Path]) -> bool:
    """Apply a profile of macOS (untested): no network, no writing, no reading of `hidden`."""
    quoted = " ".join(f'(subpath "{path}")' for path in hidden if '"' not in str(path))
    profile = "(version 1)(allow default)(deny network*)(deny file-write*)"
    profile += '(allow file-write* (literal "/dev/null"))'
    profile += f"(deny file-read* {quoted})" if quoted else ""
    try:
        init = ctypes.CDLL("/usr/lib/libsandbox.dylib").sandbox_init
    except (OSError, AttributeError):
        return False
    message = ctypes.c_char_p()
    return bool(init(profile.encode(), ctypes.c_uint64(0), ctypes.byref(message)) == 0)


# Empty the scratch folder between texts.

_SET_FLAGS: Final = 0x40086602  # FS_IOC_SETFLAGS
_NO_FLAGS: Final = struct.pack("l", 0)


def clear(folder: Path) -> None:
    """Reset a folder to its initial state: empty, default mode, times, attributes and flags. The
    working directory is `/` afterwards. Raises OSError if something cannot be removed."""
    folder.chmod(0o700)
    os.chdir(folder)
    _empty()
    for name in os.listxattr("."):
        os.removexattr(".", name)
    opened = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without flags
        fcntl.ioctl(opened, _SET_FLAGS, _NO_FLAGS)
    os.close(opened)
    os.utime(".", (0, 0))
    os.chdir("/")


def _empty() -> None:
    """Empty the working folder iteratively: nesting may exceed any path length or recursion, and
    folders may be closed."""
    left, above = [os.listdir()], [""]
    while left:
        if not left[-1]:
            left.pop()
            if name := above.pop():
                os.chdir("..")
                os.rmdir(name)
        elif stat.S_ISDIR(os.lstat(name := left[-1].pop()).st_mode):
            os.chmod(name, 0o700)
            os.chdir(name)
            left.append(os.listdir())
            above.append(name)
        else:
            os.unlink(name)
