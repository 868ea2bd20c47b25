"""Environment of child processes, without secrets.

Children process strangers' texts and models. They must not find the key's passphrase, the broker's
password, or an invitation.
"""

import os
from typing import Final

from swarm.telemetry.broker_address import PASSWORD_VARIABLE

ENVIRON_PREFIX = "SWARM_NODE_"  # prefix of settings
PASSPHRASE_VARIABLE = "SWARM_NODE_PASSPHRASE"
CACHE_VARIABLE = f"{ENVIRON_PREFIX}CACHE_DIR"  # cache directory, for children too

_KEPT: Final = frozenset(
    {"PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONHOME"}
)
_secrets = {PASSPHRASE_VARIABLE, PASSWORD_VARIABLE, f"{ENVIRON_PREFIX}INVITE"}


def withhold(name: str) -> None:
    """Remove this variable from all children: the settings name it as a secret."""
    _secrets.add(name)


def child_environ() -> dict[str, str]:
    """The current environment without secrets."""
    return {name: value for name, value in os.environ.items() if name not in _secrets}


def confined_environ() -> dict[str, str]:
    """Variables of the current environment that Python needs, for a confined process. Others may
    name files that it does not see."""
    return {name: value for name, value in child_environ().items() if name in _KEPT}
