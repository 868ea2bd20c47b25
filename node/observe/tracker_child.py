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
from typing import Any, Protocol


class Log(Protocol):
    """A tracker's run, to which rounds are written."""

    where: str  # to look at them

    def add(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        """Keep the figures of a round."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class TensorBoard:
    """Event files below the node's data directory."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(tracked["directory"])
        self.where = f"tensorboard --logdir {tracked['directory']}"

    def add(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, wall_time=time_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which its own variables set up (`WANDB_MODE`, `WANDB_API_KEY`)."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=tracked["project"],
            name=tracked["run"],
            id=tracked["run_id"],
            resume="allow",
            dir=tracked["directory"],
            config=dict(tracked["settings"]),
        )
        # A node that goes back to a checkpoint counts rounds again, and W&B's own steps only rise
        self._run.define_metric("*", step_metric="round")
        self.where = self._run.url or f"offline, in {tracked['directory']}"

    def add(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "round": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, which is kept on this machine unless its own variables say otherwise."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project=tracked["project"],
            name=tracked["run"],
            resume="allow",
            config=dict(tracked["settings"]),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = f"trackio show --project {tracked['project']}"

    def add(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self._trackio.finish()


LOGS: Mapping[str, Callable[[Mapping[str, Any]], Log]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def main() -> None:
    """Log until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is no word of ours
    tracked = json.loads(sys.stdin.readline())
    os.makedirs(tracked["directory"], exist_ok=True)
    kind = LOGS[tracked["kind"]]
    try:
        log = kind(tracked)
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
