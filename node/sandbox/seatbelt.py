"""A sandbox profile for macOS. Untested, so it does not count as a sandbox."""

import ctypes
from collections.abc import Iterable
from pathlib import Path

_LIBRARY = "/usr/lib/libsandbox.dylib"


def confine(hidden: Iterable[Path]) -> bool:
    """Refuse network, writing, and reading of `hidden`. Returns True if it took effect."""
    quoted = " ".join(f'(subpath "{path}")' for path in hidden if '"' not in str(path))
    profile = "(version 1)(allow default)(deny network*)(deny file-write*)"
    profile += '(allow file-write* (literal "/dev/null"))'
    profile += f"(deny file-read* {quoted})" if quoted else ""
    try:
        init = ctypes.CDLL(_LIBRARY).sandbox_init
    except (OSError, AttributeError):
        return False
    message = ctypes.c_char_p()
    return bool(init(profile.encode(), ctypes.c_uint64(0), ctypes.byref(message)) == 0)
