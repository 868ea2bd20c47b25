"""The policy's versions as model directories, for an engine in a process of its own.

A directory is written as `policy-<version>.partial` and renamed when it is whole. Only what the
engine may still read is kept.
"""

import shutil
from pathlib import Path

import trio

from node.training.base import Trainer

_PREFIX = "policy-"
_PARTIAL = ".partial"


class PolicyFiles:
    """The directories of one data directory; those of an earlier process are removed."""

    def __init__(self, data_directory: Path) -> None:
        self._parent = data_directory.absolute()
        self._remove_but(None)

    async def export(self, trainer: Trainer, policy_version: int) -> Path:
        """The directory of the trainer's present policy.

        Raises:
            ChildFailed: the trainer could not write it.
        """
        final = self._parent / f"{_PREFIX}{policy_version}"
        partial = final.with_name(final.name + _PARTIAL)
        await trio.to_thread.run_sync(_make_empty, partial)
        await trainer.export(partial)
        await trio.to_thread.run_sync(_replace, partial, final)
        return final

    async def keep_only(self, directory: Path) -> None:
        """Remove all the others: the engine has loaded this one."""
        await trio.to_thread.run_sync(self._remove_but, directory)

    def _remove_but(self, kept: Path | None) -> None:
        for path in self._parent.glob(f"{_PREFIX}[0-9]*"):
            if path != kept:
                shutil.rmtree(path)


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    source.rename(target)
