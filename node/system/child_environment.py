"""The environment of child processes: this process's own without its secrets.

Children handle what strangers sent, or models from anywhere. What such a text or file brings to
run must not find there what lets others in: the key's passphrase, the broker's password, or the
invitation, which may hold the key to a private swarm.
"""

import os

from swarm.telemetry.broker_address import PASSWORD_VARIABLE

ENVIRON_PREFIX = "SWARM_NODE_"  # of a node's settings
PASSPHRASE_VARIABLE = "SWARM_NODE_PASSPHRASE"
CACHE_VARIABLE = f"{ENVIRON_PREFIX}CACHE_DIR"  # of what a node keeps, in its children too

_secrets = {PASSPHRASE_VARIABLE, PASSWORD_VARIABLE, f"{ENVIRON_PREFIX}INVITE"}


def withhold(name: str) -> None:
    """Give that variable to no child of this process: the settings name one for a secret."""
    _secrets.add(name)


def child_environ() -> dict[str, str]:
    """The present environment, without what is secret."""
    return {name: value for name, value in os.environ.items() if name not in _secrets}
