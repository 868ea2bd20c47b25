"""Where a policy comes from: the `tiny` preset, made on this machine, or a model that exists.

`tiny` is built and briefly warmed on the run's own tasks, so that reinforcement learning starts
from partial competence without any download. It is cached under a hash of all that decides it;
nodes of one run that make it get the same weights. The making happens in a child process
(`python -m node.models`, the run as JSON on its input), which leaves neither torch nor
reasoning-gym in the node's own.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from node.config import NodeConfig, RunConfig
from node.monitor.progress import Work, on_stderr
from node.training.recipe import TinyRecipe, recipe_key
from swarm.errors import ChildFailed
from swarm.storage.private_files import make_shared, shared_files

TINY = "tiny"
WARM_UP_PRODUCER = "warm-up"  # no valid peer id: its tasks are in nobody's stream
DONE_FILE = "config.json"  # part of every complete model directory


def tiny_directory(run: RunConfig, cache_dir: Path | None) -> Path:
    """Where the warmed tiny policy of a run is, or will be."""
    key = recipe_key(TinyRecipe(), run.run_id)  # which also decides what is held out
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = cache_dir or user_cache / "swarm-node"
    return cache.absolute() / "policies" / f"{TINY}-{run.name}-{key[:16]}"


def resolve_model(config: NodeConfig, say: Callable[[str], None]) -> str:
    """What the trainer is to load: a directory, or a hub id. Makes the tiny preset if need be.

    Raises:
        ChildFailed: the preset could not be made.
    """
    if config.model != TINY:
        return config.model
    directory = tiny_directory(config.run, config.cache_dir)
    with shared_files():  # users may have one cache
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nodes that start together make it once
            if not (directory / DONE_FILE).exists():
                say("making and warming the tiny policy on this run's tasks (once, then cached)")
                _make_in_child(config.run, directory)
    return str(directory)


def _make_in_child(run: RunConfig, directory: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "node.models", str(directory)],
        input=run.model_dump_json().encode(),
        check=False,
    )
    if finished.returncode != 0:
        raise ChildFailed(f"making the tiny policy failed with status {finished.returncode}")


def _make_here(run: RunConfig, directory: Path) -> None:
    """The child: draw the tasks, warm the model, give it its name when it is whole."""
    from node.training.tiny import make_tiny

    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    name = "warming the tiny policy"
    with on_stderr().showing(name) as show:
        make_tiny(
            _pairs(run), partial, lambda share, line: show(Work(name, share, 1.0, line)),
            TinyRecipe(),
        )  # fmt: skip
    make_shared(partial)  # safetensors makes its files private
    partial.rename(directory)


def _pairs(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Problems of a stream of their own, none of them held out."""
    from node.tasks.scoring import pose
    from node.tasks.stream import assigned_task, held_out_tasks

    chars_max = run.limits.prompt_chars_max
    held_out = {pose(task, chars_max).prompt for task in held_out_tasks(run)}
    for index in count():
        problem = pose(assigned_task(run, WARM_UP_PRODUCER, index), chars_max)
        if problem.prompt not in held_out:
            yield problem.prompt, problem.answer


if __name__ == "__main__":
    _make_here(RunConfig.model_validate_json(sys.stdin.read()), Path(sys.argv[1]))
