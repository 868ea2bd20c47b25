"""The model that a node loads: made here (`tiny`), fetched, converted, or there already.

`tiny` is built and briefly warmed on the run's own tasks, so that learning starts from partial
competence without a download. It is cached under a hash of its inputs; all nodes of a run get the
same weights. A child process makes it (`python -m node.hosting.models`), to keep torch out of the
node's own; another one, in a sandbox, makes the problems (`node.verify.warm_up`).
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import fields
from pathlib import Path
from typing import Final

from node.config import NodeConfig, RunConfig
from node.config.joined import lasting
from node.config.node import loss_of
from node.engines.openai_engine import ServedModel, open_served_model
from node.engines.openai_server import ChatAsks, ServerTrouble
from node.engines.openai_tokenizer import fingerprint_of, ids_of
from node.engines.vllm.server import dtype
from node.hosting.fetched_models import (
    DONE_FILE,
    GGUF_SUFFIX,
    ask,
    convert_file,
    fetch_preset,
    file_directory,
    made_once,
    preset_directory,
)
from node.hosting.hand_over import share_left
from node.hosting.hub import use_cache_offline
from node.interfaces.trainer_spec import Precision, TrainerSpec
from node.methods.replay import Teacher
from node.observe.progress_bars import Work, on_stderr
from node.policies.model_files import check_files, text_note
from node.policies.presets import PRESETS, TinyRecipe, recipe_key
from node.stages.teacher import open_teacher
from node.system.caches import cache_directory
from node.system.extras import need
from node.verify.warm_up import Asked, asked_of, warm_up_problems
from swarm.errors import ChildFailed, ConfigError
from swarm.storage import make_shared
from swarm.weights.delta import names_code

TINY = "tiny"
CHECKPOINTS: Final = "checkpoints"  # in a data directory
MAKING_CPU_S = 1800  # it takes one or two minutes; a run of strangers may have problems of any size
WRONG_TASKS = 2  # the exit status of who makes it, where the run is why
PROBE = "Naïve 3.14 × 2 = 6.28, isn't it?\n\tdef f(x):"  # which tokenizers cut in unlike ways
PROMPT_TOKENS = 4096  # that vLLM has room for beside a completion


def tiny_directory(run: RunConfig, cache_dir: Path | None) -> Path:
    """The path of a run's warmed tiny policy, whether or not it exists."""
    key = recipe_key(TinyRecipe(), run.run_id)  # which also decides what is held out
    return cache_directory(cache_dir) / "policies" / f"{TINY}-{run.name}-{key[:16]}"


def resolved_model(config: NodeConfig) -> tuple[str, bool]:
    """The model that the trainer is to load, and True if it is still to be made or fetched."""
    if config.engine == "openai":  # the server has it
        return config.model, False
    need("torch")
    if preset := PRESETS.get(config.model):
        directory = preset_directory(preset, cache_directory(config.cache_dir))
    elif config.model.endswith(GGUF_SUFFIX):
        directory = file_directory(Path(config.model), cache_directory(config.cache_dir))
    elif config.model == TINY:
        directory = tiny_directory(config.run, config.cache_dir)
    else:
        _refuse_node_data(Path(config.model))
        return config.model, False
    return str(directory), not (directory / DONE_FILE).exists()


def lasting_model(model: str) -> str:
    """The name of a model for later starts and commands, which may run elsewhere."""
    return model if model == TINY or model in PRESETS else lasting(model)


def trainer_spec(config: NodeConfig, model: str, *, is_learner: bool = False) -> TrainerSpec:
    """The trainer of this node; `model` is a directory or a hub id. `is_learner`: decides the loss
    where the run names none."""
    same = NodeConfig.model_fields.keys() & {each.name for each in fields(TrainerSpec)}
    teacher = config.method(Teacher)
    others = {
        "model": model,
        "teacher_weight": teacher.weight if teacher else 0.0,
        "completion_tokens_max": config.run.sampling.max_new_tokens,
        "completion_chars_max": config.run.completion_chars_max,
        "temperature": config.run.sampling.temperature,
        "template_rules": config.run.template_rules,
        "thinking": config.run.thoughts,
        "lora_base": config.lora_base if "lora_base" in config.model_fields_set else None,
        "writes_merged": config.engine == "vllm",
        "generates_in": _generates_in(config, is_learner=is_learner),
        "gpu_share_left": share_left(config),
        "correction": "" if config.correction is None else str(config.correction),
        "preference": "" if config.preference is None else str(config.preference),
        "loss": loss_of(config, is_learner=is_learner),
    }
    return TrainerSpec(**{name: getattr(config, name) for name in same} | others)


def _generates_in(config: NodeConfig, *, is_learner: bool) -> Precision:
    """The precision of what generates from a trainer's policy."""
    if is_learner:
        return config.publish_precision
    return dtype(config.engine_quantization) if config.engine == "vllm" else "float32"


async def check_teacher(config: NodeConfig, model: str) -> None:
    """Refuse a teacher that cannot judge the tokens of this node's model."""
    if (teacher := config.method(Teacher)) is None:
        return
    where, sampling = f"--replay teacher, url={teacher.url}", config.run.engine_sampling
    if not sampling.is_whole or sampling.temperature != 1.0:
        raise ConfigError(
            f"{where}: run {config.run.name} must sample with temperature and top_p 1"
        )
    try:
        async with open_teacher(teacher, _asks(config)) as server:
            theirs = await server.tokens_of(PROBE, is_bare=True)
            told = await server.logprobs_of(theirs[:1], theirs[1:])
    except (ServerTrouble, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if not told:
        raise ConfigError(f"{where}: it tells no log-probs of given tokens, as vLLM does")
    if theirs != await ids_of(model, PROBE):
        raise ConfigError(f"{where}: its tokenizer has other ids than that of {model}")


@asynccontextmanager
async def served_model(config: NodeConfig) -> AsyncIterator[ServedModel]:
    """The model of the engine `openai`, which has answered once."""
    key = None
    if config.engine_key_env is not None:
        key = os.environ.get(config.engine_key_env)
        if not key:
            raise ConfigError(
                f"engine_key_env = {config.engine_key_env}: that variable is not set: put the "
                "server's key there"
            )
    tokenizer = ""
    if config.engine_tokenizer is not None:
        need("transformers")
        tokenizer = await fingerprint_of(config.engine_tokenizer)
    assert config.engine_url is not None  # checked with the settings
    async with open_served_model(
        config.engine_url,
        config.model if "model" in config.model_fields_set else None,
        key,
        prompts=config.engine_prompts,
        tokenizer=tokenizer,
        requests_max=config.engine_requests_max,
        asks=_asks(config),
    ) as served:
        yield served


def _asks(config: NodeConfig) -> ChatAsks:
    thinking = config.run.thoughts
    return ChatAsks(config.run.chat.arguments, "" if thinking is None else thinking.end)


def _refuse_node_data(model: Path) -> None:
    """Refuse a node's checkpoint, which holds neither configuration nor tokenizer."""
    is_checkpoint = model.parent.name == CHECKPOINTS
    data = model.parent.parent if is_checkpoint else model
    if (data / CHECKPOINTS).is_dir() and not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: a node's data; write a model of it first: swarm-node export OUT "
            f"--data-dir {data}"
        )


def vllm_context_tokens(config: NodeConfig) -> int:
    """The context that vLLM reserves room for at its start."""
    return config.context_tokens_max or PROMPT_TOKENS + config.run.sampling.max_new_tokens


def resolve_model(config: NodeConfig, say: Callable[[str], None]) -> str:
    """The model that the trainer loads, a directory or a hub id; made, fetched or converted first
    if it is missing."""
    model, missing = resolved_model(config)
    if missing:
        cache = cache_directory(config.cache_dir)
        if preset := PRESETS.get(config.model):
            fetch_preset(preset, cache, say, ask(config.yes))
        elif config.model.endswith(GGUF_SUFFIX):
            convert_file(Path(config.model), cache, say)
        else:
            with made_once(Path(model)) as still_missing:
                if still_missing:
                    say(
                        "making and warming the tiny policy on this run's tasks (once, then cached)"
                    )
                    _make_in_child(config, Path(model))
    else:
        check_files(model)
        notes = (use_cache_offline(model), code_note(Path(model)), text_note(Path(model)))
        for note in notes:
            if note is not None:
                say(note)
    return model


def code_note(model: Path) -> str | None:
    """The note about a model directory that comes with code of its own; None: it has none."""
    if (file := names_code(model)) is None:
        return None
    return f"model {model}: {file} names code of its own, which is not run"


def _make_in_child(config: NodeConfig, directory: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "node.hosting.models", str(directory)],
        input=json.dumps(asked_of(config)).encode(),
        stdout=subprocess.PIPE,
        check=False,
    )
    if finished.returncode == -signal.SIGXCPU:
        raise ChildFailed(
            f"making the tiny policy took over {MAKING_CPU_S} s of CPU time: the problems of run "
            f"{config.run.name} are too large for it; make them smaller or name another --model"
        )
    if finished.returncode == WRONG_TASKS:
        raise ConfigError(finished.stdout.decode(errors="replace").strip())
    if finished.returncode != 0:
        raise ChildFailed(f"making the tiny policy failed with status {finished.returncode}")


def _make_here(asked: Asked, directory: Path) -> None:
    """The child: draw tasks, warm the model, rename it when it is whole."""
    from node.policies.tiny import make_tiny

    resource.setrlimit(resource.RLIMIT_CPU, (MAKING_CPU_S, MAKING_CPU_S + 10))
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    name = "warming the tiny policy"
    with on_stderr().showing(name) as show:
        make_tiny(
            warm_up_pairs(asked), partial, lambda share, line: show(Work(name, share, 1.0, line)),
            TinyRecipe(),
        )  # fmt: skip
    make_shared(partial)  # safetensors makes its files private
    partial.rename(directory)


def warm_up_pairs(asked: Asked) -> Iterator[tuple[str, str]]:
    """Prompts and right answers without end; one pair for each turn of a problem."""
    from node.policies.tiny import ANSWER, EOS

    with closing(warm_up_problems(asked)) as problems:
        for said, turns in problems:
            for text, reply in turns:
                yield said, text
                said = f"{said}{ANSWER}{text}{EOS}{reply}"


def main() -> None:
    """The child. What is wrong with the tasks goes to standard output."""
    try:
        _make_here(json.loads(sys.stdin.read()), Path(sys.argv[1]))
    except ConfigError as error:
        sys.stdout.write(str(error))
        raise SystemExit(WRONG_TASKS) from None


if __name__ == "__main__":
    main()
