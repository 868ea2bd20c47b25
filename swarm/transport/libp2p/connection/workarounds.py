"""Which behaviour of py-libp2p 0.8.1 is replaced.

The modules of `swarm.transport.libp2p` each name the upstream behaviour that they replace. Some of
it can be switched off here, so that a test can show that it is still needed. They reach into
internals, so the host refuses to start on any other version of libp2p.
"""

from dataclasses import dataclass
from importlib import metadata
from typing import Final

from swarm.errors import ConfigError

LIBP2P_VERSION: Final = "0.8.1"


@dataclass(frozen=True, slots=True)
class Workarounds:
    """Which upstream behaviours are replaced. All of them, except in tests."""

    hard_yamux: bool = True
    reap_inbound: bool = True
    gossip_limits: bool = True
    fast_noise: bool = True


ALL_WORKAROUNDS = Workarounds()


def require_version(found: str | None = None) -> None:
    """Refuse any libp2p but the one whose internals these modules replace.

    Raises:
        ConfigError: another version is installed.
    """
    found = found or metadata.version("libp2p")
    if found != LIBP2P_VERSION:
        raise ConfigError(
            f"needs libp2p {LIBP2P_VERSION}, found {found}: "
            f"run pip install libp2p=={LIBP2P_VERSION}"
        )
