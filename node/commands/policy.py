"""`swarm-node eval`, `export`, `chat`, `model` and `clean`: commands on trained and fetched models.

A node may be running meanwhile: its newest checkpoint stays while it is read.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio
from pydantic import ValidationError

from node.commands.environments import check_repository, push
from node.config import NodeConfig
from node.config.joined import DIRECTORIES_FILE
from node.config.run import ChatRules
from node.hosting.fetched_models import DONE_FILE, fetch_preset, preset_directory
from node.hosting.models import code_note, resolve_model, trainer_spec
from node.interfaces.trainer_spec import Precision
from node.observe.abilities import TaskResult, told, told_compared
from node.observe.progress_bars import on_stderr
from node.observe.text_format import amount
from node.policies.presets import PRESETS
from node.run.checkpoints import Checkpoint
from node.run.evaluation import examine
from node.run.role import checkpoints_of
from node.system.caches import cache_directory
from node.train.process import TrainerProcess, open_trainer
from node.verify.verifier import ProcessVerifier
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.storage import make_shared, private_files

Say = Callable[[str], None]
T = TypeVar("T")
TEMPERATURE_MAX = 10.0
SAMPLES_MAX = 1024
BEFORE = "before"  # to compare with: the model as it was before training


def examine_node(config: NodeConfig, say: Say, *, samples: int, against: str | None = None) -> None:
    """Evaluate the newest checkpoint on the held-out tasks, without a network. A node without a
    checkpoint gives the model before training. `against` is `BEFORE`, another node's data
    directory, or a model directory to compare with."""
    if not 0 <= samples <= SAMPLES_MAX:
        raise ConfigError(f"--samples {samples}: must be from 0 to {SAMPLES_MAX}")
    if "data_dir" in config.model_fields_set or config.data_dir.exists():
        _check_directory(config)  # else there is no node yet, and its policy is the model
    model = resolve_model(config, say)
    other = None if against is None else _other(config, against)
    with checkpoints_of(config).held() as saved:
        if saved is None:
            say(
                f"{config.data_dir}: no checkpoint yet; this is the model as it was before training"
            )
        results = _examine(config, model, saved, samples, "held-out tasks")
    compared = None
    if other is not None:
        config, other_model, has_checkpoint = other
        with checkpoints_of(config).held() if has_checkpoint else nullcontext() as theirs:
            if has_checkpoint and theirs is None:
                raise ConfigError(f"--against {against}: no checkpoint yet")
            what = "held-out tasks, to compare"
            compared = _examine(config, other_model or model, theirs, samples, what)
    after = saved.progress.round if saved else 0
    say(f"run {config.run.name}, held-out tasks passed after round {after}, 95 % intervals:")
    _say_all(say, told(results))
    if compared is not None:
        say(f"the same tasks by {against}:")
        _say_all(say, told(compared))
        say("difference in points, task by task; unlocked: solved now, and never before:")
        _say_all(say, told_compared(compared, results))


def _say_all(say: Say, lines: Sequence[str]) -> None:
    for line in lines:
        say(f"  {line}")


def _other(config: NodeConfig, against: str) -> tuple[NodeConfig, str | None, bool]:
    """Settings, model (None: the same) and whether to read a checkpoint, for the comparison."""
    if against == BEFORE:
        return config, None, False
    directory = Path(against)
    if (directory / "config.json").is_file():
        return config.model_copy(update={"lora_rank": 0}), str(directory), False
    if not directory.is_dir():
        raise ConfigError(
            f"--against {against}: no such directory; name a node's data directory, a model "
            f"directory, or {BEFORE!r} for the model before training"
        )
    return config.model_copy(update={"data_dir": directory}), None, True


def _examine(
    config: NodeConfig, model: str, saved: Checkpoint | None, samples: int, what: str
) -> list[TaskResult]:
    async def measure(saved: Checkpoint | None) -> list[TaskResult]:
        async with (
            _trainer(config, model, saved) as trainer,
            ProcessVerifier.open(config) as verifier,
        ):
            return await examine(config.run, trainer, verifier, samples)

    with on_stderr().showing(f"evaluating on {config.run.held_out.tasks} {what}", always=True):
        return _run(measure, saved)


def export_policy(
    config: NodeConfig,
    out: Path,
    say: Say,
    *,
    adapter: bool,
    precision: Precision,
    repository: str | None = None,
) -> int:
    """Write the newest checkpoint as a Hugging Face model directory, or its adapter in PEFT's
    format. `repository`: where to upload it. Returns the checkpoint's round."""
    if repository is not None:
        check_repository(repository)
    _check_directory(config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; name a directory that is not")
    if adapter and not config.lora_rank:
        raise ConfigError("--adapter: this node trains no adapter; give its --lora-rank")
    with checkpoints_of(config).held() as saved:
        if saved is None:
            raise ConfigError(f"--data-dir {config.data_dir}: no checkpoint yet")
        model = resolve_model(config, say)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with on_stderr().showing(f"writing {out}"):
                _run(partial(_write, config, model, out, None if adapter else precision), saved)
        except OSError as error:
            raise ConfigError(f"{out}: {error.strerror}") from None
        number = saved.progress.round
    if repository is not None:
        push(out, repository, f"Run {config.run.run_id}, after round {number}", say)
    return number


async def _write(
    config: NodeConfig, model: str, out: Path, whole: Precision | None, saved: Checkpoint | None
) -> None:
    """Write the whole model in the precision `whole`; None: the adapter alone."""
    async with _trainer(config, model, saved) as trainer:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as room:
            made = Path(room) / "policy"
            made.mkdir()
            if whole is None:
                await trainer.export(made)
            else:
                await trainer.export_whole(made, whole)
            make_shared(made)
            made.rename(out)


def chat(
    directory: Path, system: str, max_new_tokens: int, temperature: float, arguments: str
) -> int:
    """Talk to a model directory, in a process of its own; its exit status."""
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens}: must be at least 1")
    if not 0 <= temperature <= TEMPERATURE_MAX:
        raise ConfigError(f"--temperature {temperature}: must be from 0 to {TEMPERATURE_MAX}")
    if not (directory / "config.json").is_file():
        hint = " (make one of a node's checkpoint with swarm-node export)"
        raise ConfigError(f"{directory} is no model directory{hint}")
    if note := code_note(directory):
        sys.stderr.write(f"swarm-node: {note}\n")
    command = [sys.executable, "-m", "node.policies.chat", str(directory)]
    command += ["--max-new-tokens", str(max_new_tokens), "--temperature", str(temperature)]
    try:
        named = ChatRules(arguments=arguments).arguments
    except ValidationError:
        raise ConfigError(f"--chat {arguments}: must be a JSON object") from None
    command += [f"--system={system}", "--chat", named]
    return subprocess.run(command, check=False).returncode


def _check_directory(config: NodeConfig) -> None:
    if not config.data_dir.is_dir():
        raise ConfigError(f"--data-dir {config.data_dir}: no such directory; name a node's")
    if (config.data_dir / DONE_FILE).is_file():
        raise ConfigError(
            f"--data-dir {config.data_dir}: a model directory and no node's; name it with "
            f"--model {config.data_dir}, and leave --data-dir out"
        )


@asynccontextmanager
async def _trainer(
    config: NodeConfig, model: str, saved: Checkpoint | None
) -> AsyncIterator[TrainerProcess]:
    """A trainer whose log is not that of a node that may be running."""
    with tempfile.TemporaryDirectory() as room:
        async with open_trainer(
            trainer_spec(config, model), Path(room), saved.directory if saved else None
        ) as trainer:
            yield trainer


def _run(work: Callable[[Checkpoint | None], Awaitable[T]], saved: Checkpoint | None) -> T:
    try:
        with private_files():
            return trio.run(work, saved)
    except* (ConfigError, ChildFailed, OSError) as group:
        raise first_of(group) from None


# `swarm-node model` and `clean`: what can be fetched without a hub, and what is kept of it.

# Folders of the cache; all else in it is not ours.
CACHED: Final = ("models", "policies", "data", "monitor")


def get_model(name: str, cache_dir: Path | None, say: Callable[[str], None]) -> Path:
    """Fetch a preset and convert it; its directory. The command itself is the consent."""
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"{name}: no such model; there are: {', '.join(PRESETS)}")
    return fetch_preset(preset, cache_directory(cache_dir), say, lambda question: True)


def list_models(cache_dir: Path | None) -> Iterator[str]:
    for preset in PRESETS.values():
        directory = preset_directory(preset, cache_directory(cache_dir))
        where = directory if (directory / DONE_FILE).exists() else "not here"
        size = amount(preset.wheel_bytes, "B")
        yield f"{preset.name}  {preset.title}, {preset.licence}, {size} to fetch: {where}"


def clean(cache_dir: Path | None, agreed: Callable[[str], bool], say: Callable[[str], None]) -> int:
    """Remove cached models and policies after consent; the bytes freed. Data directories stay."""
    cache = cache_directory(cache_dir)
    kept = [path for kind in CACHED for path in sorted((cache / kind).glob("*"))]
    kept += cache.glob(DIRECTORIES_FILE)
    # Locks are empty, and a node that is just making something holds its own
    sizes = {path: _bytes_of(path) for path in kept if path.suffix != ".lock"}
    if not sizes:
        say(f"{cache}: nothing to remove")
        return 0
    for path, size in sizes.items():
        say(f"{amount(size, 'B'):>9}  {path}")
    total = sum(sizes.values())
    if not agreed(f"remove {amount(total, 'B')}? nodes that run here may still need it"):
        say("nothing was removed; --yes agrees where nobody is at a terminal")
        return 0
    for path in sizes:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
    say(f"{amount(total, 'B')} removed")
    return total


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.lstat().st_size for each in files)
