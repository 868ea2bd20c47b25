"""The plan file: a learner and its workers, as TOML."""

from dataclasses import dataclass
from pathlib import Path

from coordinator.model.activation import Settings
from coordinator.model.capacity import WORKERS_MAX, Run, Worker, check_workers
from coordinator.tables import Tables, checked, named, numbered, read_tables

EXAMPLE = """\
# What `swarm-coordinator plan --file` reads. Every figure here is invented; put in your own.

[run]                          # the learner
groups_per_step = 128          # R: rollout groups that one update consumes
train_s = 100.0                # T: seconds of one update
staleness_max = 6              # S: how many steps old a group may be when it is consumed
weights_bytes = 16_400_000_000 # a whole version
# Bytes of a delta by the steps between two versions. Left out: whole versions are sent.
delta_bytes = [[1, 680_000_000], [4, 1_500_000_000], [8, 2_030_000_000]]
up_mbit_per_s = 1000           # the learner's uplink
latency_s = 0.05               # one way between two machines
load_s = 5.0                   # encoding, patching and loading one version
group_bytes = 200_000          # one group on its way back
price_per_h = 15.12            # dollars for the learner
egress_price_per_gb = 0.0      # dollars for what it sends
# inflight_groups_max = 300    # groups generating or waiting; left out: what is needed

[settings]
margin = 1.1                   # supply over what is required

[[workers]]
name = "gpu"
count = 12                     # so many of these: gpu-1 to gpu-12
groups_per_s = 0.16            # measured: groups it generates, whatever becomes of them
generation_s = 90.0            # from the first token of a group to its last, of all but the slowest
up_mbit_per_s = 300
down_mbit_per_s = 900
price_per_h = 0.69
failed_share = 0.02            # of its groups that are never admitted
start_s = 240.0                # paid, and not generating yet
lifetime_s = 14400.0           # mean on a spot market; left out: it stays until it is released

[[workers]]
name = "volunteer"
count = 4
groups_per_s = 0.05
generation_s = 150.0
up_mbit_per_s = 20
down_mbit_per_s = 200
relayed = true                 # behind a router, so it passes nothing on

[[workers]]
name = "datacentre"
groups_per_s = 0.9
generation_s = 60.0
up_mbit_per_s = 1000
down_mbit_per_s = 1000
price_per_h = 6.5
egress_price_per_gb = 0.09
"""


@dataclass(frozen=True, slots=True)
class _Workers(Worker):
    """One worker, or `count` of them."""

    count: int | None = None


class _PlanTables(Tables):
    run: Run
    workers: tuple[_Workers, ...] = ()
    settings: Settings = Settings()


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The contents of a plan file."""

    run: Run
    workers: tuple[Worker, ...]
    settings: Settings


def load_plan(path: Path) -> PlanFile:
    """
    Raises:
        ConfigError: the file cannot be read, or a setting is wrong; one line.
    """
    with named(path):
        file = checked(_PlanTables, read_tables(path))
        workers: list[Worker] = []
        for number, entry in enumerate(file.workers, 1):
            workers += numbered(entry, Worker, number, WORKERS_MAX - len(workers))
        check_workers(workers)
        return PlanFile(file.run, tuple(workers), file.settings)
