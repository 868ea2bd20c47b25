"""Code that looks for the answer of a text that ran before it, each kind in another place.

Each returns the secrets that it finds: 16 hexadecimal digits behind the mark, or the hexadecimal
digits of both. Its own source holds neither.

`python -m tests.unit.thieves KIND` is the control: a process in which the text before left its
secret in all of these places, as one that ran texts one after the other would. It writes whether
the thief finds it there.
"""

import sys
from collections.abc import Mapping
from typing import Final

_START: Final = """
import re
MARK = "MA" + "RK:"
def secrets(value):
    text = value if isinstance(value, bytes) else repr(value).encode("utf-8", "replace")
    spelled = re.findall(MARK.encode().hex().encode() + b"((?:3[0-9]|6[1-6]){16})", text)
    found = re.findall(MARK.encode() + b"([0-9a-f]{16})", text)
    found += [bytes.fromhex(each.decode()) for each in spelled]
    return [each.decode() for each in found]
"""
_PROBES: Final = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def readable(page):  # what is not mapped fails with EFAULT, anything else with another error
    libc.access(ctypes.c_void_p(page), 0)
    return ctypes.get_errno() != 14
def scan(start, end):
    found = []
    for page in range(start & ~4095, end, 4096):
        if readable(page):
            found += secrets(ctypes.string_at(page, 4096))
    return found
"""
THIEVES: Final[Mapping[str, str]] = {
    "frames": """
import sys
def solve(_):
    frame, found = sys._getframe(), []
    while frame:
        found += secrets(frame.f_locals) + secrets(list(frame.f_globals.values()))
        frame = frame.f_back
    return found
""",
    "frames of an exception": """
def solve(_):
    try:
        raise ValueError
    except ValueError as error:
        frame, found = error.__traceback__.tb_frame, []
        while frame:
            found += secrets(frame.f_locals)
            frame = frame.f_back
    return found
""",
    "objects that the collector knows": """
import gc
def solve(_):
    return [each for known in gc.get_objects() if isinstance(known, (dict, list, tuple))
            for each in secrets(known)]
""",
    "modules": """
import builtins, sys
def solve(_):
    return [each for module in [builtins, *sys.modules.values()]
            for value in list(vars(module).values()) for each in secrets(value)]
""",
    "the heap": _PROBES
    + """
def solve(_):
    libc.sbrk.restype = ctypes.c_void_p
    end = libc.sbrk(0)
    return scan(end - 2**24, end)
""",
    "objects' arenas": _PROBES
    + """
def solve(_):
    arenas = {id(each) >> 20 for each in [solve, secrets, re, [], {}, 1.5, "text", object()]}
    return [each for arena in arenas for each in scan((arena - 1) << 20, (arena + 2) << 20)]
""",
    "the environment": """
import os
def solve(_):
    return secrets(dict(os.environ)) + secrets(os.environb)
""",
    "descriptors": """
import os
def solve(_):
    found = []
    for number in range(64):
        try:
            found += secrets(os.pread(number, 2**16, 0))
        except OSError:
            continue
    return found
""",
    "files": """
import os
def solve(_):
    found = []
    for folder in (".", "/scratch", "/tmp", "/dev/shm", os.environ.get("TMPDIR", ".")):
        try:
            for name in os.listdir(folder):
                found += secrets(name)
                with open(os.path.join(folder, name), "rb") as file:
                    found += secrets(file.read(2**16))
        except OSError:
            continue
    return found
""",
    "its own memory as a file": """
import os
def solve(_):
    found = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            if "heap" in line or "/" not in line:
                try:
                    memory.seek(start)
                    found += secrets(memory.read(min(end - start, 2**26)))
                except (OSError, ValueError, OverflowError):
                    continue
    return found
""",
    "attributes of files": """
import os
def solve(_):
    return [each for name in os.listxattr(os.__file__)
            for each in secrets(os.getxattr(os.__file__, name))]
""",
    "memory that processes share": """
import ctypes
def solve(_):
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    found = []
    for number in range(64):
        place = libc.shmat(number, None, 0)
        if place not in (None, 2**64 - 1):
            found += secrets(ctypes.string_at(place, 4096))
    return found
""",
}
CONTROLLED: Final = frozenset(THIEVES) - {
    "attributes of files", "memory that processes share",  # of which a machine may lack either
}  # fmt: skip


def thief(kind: str) -> str:
    """The source of one, with its function `solve`."""
    return _START + THIEVES[kind]


def main() -> None:
    import builtins
    import json
    import os
    import tempfile

    secret = os.urandom(8).hex()
    left = {"answer": f"MARK:{secret}"}
    text = "".join(["MARK:", secret])
    builtins.left = [left, text]  # type: ignore[attr-defined]
    os.environ["LEFT"] = text
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/left", "w+") as file:
        file.write(text)
        file.flush()
        os.chdir(folder)
        names: dict[str, object] = {}
        exec(thief(sys.argv[1]), names)
        try:
            found = names["solve"](0)  # type: ignore[operator]
        finally:
            os.chdir("/")
    sys.stdout.write(json.dumps(secret in found))


if __name__ == "__main__":
    main()
