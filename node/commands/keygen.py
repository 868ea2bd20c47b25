"""`swarm-node keygen`: make a key before the first start."""

import os
from pathlib import Path

from swarm.errors import ConfigError
from swarm.identity import Identity


def make_key(out: Path, passphrase_env: str | None) -> str:
    """Write a new key to a file; its peer id. The variable `passphrase_env` holds the
    passphrase."""
    passphrase = None
    if passphrase_env:
        passphrase = os.environ.get(passphrase_env)
        if not passphrase:
            raise ConfigError(f"--passphrase-env {passphrase_env}: no such variable; set it first")
    identity = Identity.generate()
    identity.save(out, passphrase)
    return identity.peer_id
