"""The process in which a tracker's package runs.

    python -m node.observe.tracker_child

The first line of standard input says which tracker, and of what; each further one is a round. It
says `ready`, and where to look, or what is wrong; and ends with its input.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, float]


class Log(NamedTuple):
    """A tracker's run, to which rounds are written."""

    where: str  # to look at them
    add: Callable[[int, float, Figures], None]  # a round, its unix time and its figures
    close: Callable[[], object]  # writes what is not written yet


def tensorboard(tracked: Mapping[str, Any]) -> Log:
    """Event files below the node's data directory; one of them has the settings."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary import Writer
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    settings = {name: "none" if v is None else v for name, v in tracked["settings"].items()}
    file = EventFileWriter(tracked["directory"], filename_suffix=".settings")
    told = hparams_pb(settings, tracked["run_id"], tracked["started_s"])
    file.add_event(Event(wall_time=tracked["started_s"], summary=told))
    file.close()
    writer = Writer(tracked["directory"])

    def add(step: int, time_s: float, figures: Figures) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step, wall_time=time_s)
        writer.flush()

    return Log(f"tensorboard --logdir {tracked['directory']}", add, writer.close)


def wandb(tracked: Mapping[str, Any]) -> Log:
    """A run of Weights & Biases, which its own variables set up (`WANDB_MODE`, `WANDB_API_KEY`)."""
    import wandb

    run = wandb.init(
        project=tracked["project"],
        name=tracked["run"],
        id=tracked["run_id"],
        resume="allow",
        dir=tracked["directory"],
        config=dict(tracked["settings"]),
    )
    # A node that goes back to a checkpoint counts rounds again, and W&B's own steps only rise
    run.define_metric("*", step_metric="round")

    def add(step: int, time_s: float, figures: Figures) -> None:
        run.log({**figures, "round": step})

    return Log(run.url or f"offline, in {tracked['directory']}", add, run.finish)


def trackio(tracked: Mapping[str, Any]) -> Log:
    """A run of trackio, which is kept on this machine unless its own variables say otherwise."""
    import trackio

    trackio.init(
        project=tracked["project"],
        name=tracked["run"],
        resume="allow",
        config=dict(tracked["settings"]),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    def add(step: int, time_s: float, figures: Figures) -> None:
        trackio.log(dict(figures), step=step)

    return Log(f"trackio show --project {tracked['project']}", add, trackio.finish)


LOGS: Mapping[str, Callable[[Mapping[str, Any]], Log]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is no word of ours
    tracked = json.loads(sys.stdin.readline())
    os.makedirs(tracked["directory"], exist_ok=True)
    try:
        log = LOGS[tracked["kind"]](tracked)
    except Exception as error:  # noqa: BLE001 - packages raise what they like; it is told
        line = " ".join(str(error).split()) or type(error).__name__
        told.write(f"{line}\n")
        raise SystemExit(1) from None
    told.write(f"ready {log.where}\n")
    told.flush()
    for line in sys.stdin:
        told_of = json.loads(line)
        log.add(told_of["step"], told_of["time_s"], told_of["figures"])
    log.close()


if __name__ == "__main__":
    main()
