"""The plan file: a learner and its workers, as TOML."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from coordinator.model.activation import Settings
from coordinator.model.capacity import WORKERS_MAX, Run, Worker, check_workers
from coordinator.tables import Tables, checked, named, numbered, read_tables

EXAMPLE: Final = files("coordinator").joinpath("plan.toml").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Workers(Worker):
    """One worker, or `count` of them."""

    count: int | None = None


class PlanFile(Tables):
    """The contents of a plan file."""

    run: Run
    workers: tuple[_Workers, ...] = ()
    settings: Settings = Settings()


def load_plan(path: Path) -> PlanFile:
    """
    Raises:
        ConfigError: the file cannot be read, or a setting is wrong; one line.
    """
    with named(path):
        file = checked(PlanFile, read_tables(path))
        workers: list[_Workers] = []
        for number, entry in enumerate(file.workers, 1):
            workers += numbered(entry, number, WORKERS_MAX - len(workers))
        check_workers(workers)
        return file.model_copy(update={"workers": tuple(workers)})
