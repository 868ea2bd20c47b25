"""The keys of workers that a provider runs: made here, one directory each, kept for good."""

import contextlib
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError
from swarm.identity import Identity, PeerId

KEY_FILE: Final = "identity.pem"


class WorkerKeys:
    """Blocks on the disk, but for `of` and `__contains__`; threads may share one."""

    def __init__(self, directory: Path) -> None:
        """`directory`: of folders named as the workers are."""
        self._directory = directory
        self._peer_ids: dict[str, PeerId] = {}  # of all that were ever started here, by name

    def __contains__(self, peer: PeerId) -> bool:
        return peer in list(self._peer_ids.values())  # threads add to it

    def of(self, name: str) -> PeerId | None:
        """A worker's peer id, where it is known."""
        return self._peer_ids.get(name)

    def look(self) -> None:
        """Read those that an earlier process made."""
        for key in self._directory.glob(f"*/{KEY_FILE}"):
            if key.parent.name not in self._peer_ids:
                with contextlib.suppress(ConfigError):  # said when it is to be started
                    self._peer_ids[key.parent.name] = Identity.load(key, None).peer_id

    def made(self, name: str) -> Path:
        """A worker's key file, there from now on.

        Raises:
            ConfigError: it cannot be used.
            OSError: it cannot be written.
        """
        path = self._directory / name / KEY_FILE
        if not path.exists():
            Identity.generate().save(path, None)
        self._peer_ids[name] = Identity.load(path, None).peer_id
        return path
