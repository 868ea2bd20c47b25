"""The adapter of `verifiers`. The only file that imports it, at the first problem in the verifier's
process, since the import takes seconds and 200 MB.

Rewards are computed as the library's `Task.score` does, but without an event loop, for which a
sandbox has no sockets: a grader may await another grader only.
"""

import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from node.envs.package_identity import Seen
from node.envs.package_rules import LOADED_MAX, TASKS_MAX, awaited
from node.envs.taskset_rules import TasksetRules, library_version, rules_of, wrong
from swarm.texts import printable

CHECKED_TASKS: Final = 16  # tasks whose own answer is graded
FIELDS_SHOWN_MAX: Final = 12
NEAR: Final = 1e-9  # rounding error of weights such as 0.7, 0.2 and 0.1
_HOOKS: Final = ("setup", "finalize", "stage_verifier")  # need a machine of their own


class ForeignTask:
    def __init__(self, task: Any, place: int, rules: TasksetRules) -> None:
        self.place = place
        self.prompt = _prompt(task)
        self.hash = str(task.hash)
        self.answer = _answer(task, rules)
        self._task = task

    def worth(self, reply: str) -> float:
        """The weighted sum of the taskset's rewards of one reply."""
        trace = _trace_of(self._task, reply)
        given = {"task": self._task.data, "trace": trace}
        for hook in self._task.hooks("metric"):
            trace.record_metrics(_scores(hook, given))
        for hook in self._task.hooks("reward"):
            weight = getattr(hook, "_vf_weight", 1.0)
            for name, score in _scores(hook, given).items():
                trace.record_reward(name, score, weight)
        total = float(trace.reward)
        return float(round(total)) if abs(total - round(total)) < NEAR else total


@lru_cache(maxsize=LOADED_MAX)
def loaded(parameters: str) -> tuple[ForeignTask, ...]:
    """The tasks of a run's parameters; ConfigError if what is installed makes others."""
    rules = rules_of(parameters)
    tasks = _load(rules)
    rules.check_hash(rules.sha256, _hash_of(rules, tasks))
    return tasks


def check(rules: TasksetRules, _again: bool = False) -> Seen:
    """The hash of a taskset's package, configuration and tasks; ConfigError if it is refused."""
    tasks = _load(rules)
    step = max(1, len(tasks) // CHECKED_TASKS)
    for task in tasks[::step][:CHECKED_TASKS]:
        reply = rules.reply_of(task.answer)
        with rules.foreign_code("cannot grade its own answer"):
            reward = task.worth(reply)
        if reward != 1.0:
            raise rules.refusal(
                f"its own answer {printable(reply, 60)!r} is worth "
                f"{reward:g} and not 1; say by the parameter reply how it wants an answer, such "
                "as '<answer>{}</answer>', and by answer which field has a right one",
            )
    return Seen(_hash_of(rules, tasks))


def _hash_of(rules: TasksetRules, tasks: tuple[ForeignTask, ...]) -> str:
    told = [
        library_version(),
        rules.digest(),
        rules.model_dump(mode="json", exclude={"sha256"}),
        [[each.hash, each.prompt, each.answer] for each in tasks],
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


# --- what a taskset is ------------------------------------------------------------------------


def _load(rules: TasksetRules) -> tuple[ForeignTask, ...]:
    with rules.foreign_code("cannot be loaded"):
        source = _taskset(rules)
        if not source.bounded and rules.tasks is None:
            raise rules.refusal("never ends; say by the parameter tasks how many of it to take")
        view = source if rules.tasks is None else source.take(rules.tasks)
        found = list(itertools.islice(view, TASKS_MAX + 1))
        if not found:
            raise rules.refusal("has no tasks with this config")
        if len(found) > TASKS_MAX:
            raise rules.refusal(f"has over {TASKS_MAX} tasks; take some by the parameter tasks")
        if reason := _refusal(source, found):
            raise rules.refusal(f"{reason}, so that strangers could not work out its rewards")
        return tuple(ForeignTask(task, at, rules) for at, task in enumerate(found))


def _taskset(rules: TasksetRules) -> Any:
    from verifiers.v1.env import Env
    from verifiers.v1.utils import loaders

    module = loaders.import_taskset(rules.taskset)
    if module.__name__ != rules.taskset:
        raise rules.refusal("is one of the library's own, which need servers")
    for name in getattr(module, "__all__", ()):
        exported = getattr(module, name, None)
        if isinstance(exported, type) and issubclass(exported, Env):
            raise rules.refusal("brings an environment of several agents")
    config = loaders.taskset_config_type(rules.taskset)
    return loaders.taskset_class(rules.taskset)(
        config.model_validate({**rules.config, "id": rules.taskset})
    )


def _refusal(source: Any, tasks: list[Any]) -> str | None:
    """The reason why a reward depends on more than one reply's text; None: it does not."""
    from verifiers.v1.task import Task

    kind = type(tasks[0])
    if any(type(each) is not kind or each.config != tasks[0].config for each in tasks):
        return "its tasks are of several types or configurations"
    if type(source).toolsets(source.config) or kind.toolsets(tasks[0].config):
        return "it needs tool servers"
    if tasks[0].plugged_judges():
        return "a judge grades it"
    if kind.NEEDS_CONTAINER or any(each.data.image for each in tasks):
        return "it needs a container"
    if hook := next(
        (each for each in _HOOKS if getattr(kind, each) is not getattr(Task, each)), ""
    ):
        return f"it prepares a machine of its own ({hook})"
    for grader in (*tasks[0].hooks("metric"), *tasks[0].hooks("reward")):
        runtime = inspect.signature(grader).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"{grader.__name__} looks at the machine that a reply ran on"
    if not tasks[0].hooks("reward") or kind.score is not Task.score:
        return "it has no rewards of its own, or adds them up in a way of its own"
    if any(each.data.skills or each.data.artifacts for each in tasks):
        return "it works on files"
    return None


def _prompt(task: Any) -> str:
    """The system prompt and the user's messages in one text; ConfigError if there are several
    turns."""
    data = task.data
    said = [data.system_prompt] if data.system_prompt else []
    if isinstance(data.prompt, str):
        said.append(data.prompt)
    else:
        for message in data.prompt or []:
            if message.role not in ("system", "user") or not isinstance(message.content, str):
                raise wrong(f"task {data.idx}: its prompt is more than one turn of text")
            said.append(message.content)
    if not any(text.strip() for text in said[bool(data.system_prompt) :]):
        raise wrong(f"task {data.idx}: has no prompt; it is for its user to begin")
    return "\n\n".join(said)


def _answer(task: Any, rules: TasksetRules) -> str:
    fields = task.data.model_dump(exclude_unset=True)
    if rules.answer not in fields:
        known = ", ".join(sorted(set(fields) - {"idx"})[:FIELDS_SHOWN_MAX])
        raise rules.refusal(
            f"its tasks have no field {rules.answer!r} with a right "
            f"answer; name one by the parameter answer: {known}",
        )
    return str(fields[rules.answer])


# --- what a reply is worth --------------------------------------------------------------------


def _trace_of(task: Any, reply: str) -> Any:
    """The library's record of a policy that replied once and stopped."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Timing, Trace, TraceTask, VersionInfo
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    data = task.data
    said: list[Any] = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        said.append(UserMessage(content=data.prompt))
    else:
        said += data.prompt
    said.append(AssistantMessage(content=reply))
    nodes = [
        MessageNode(
            parent=at - 1 if at else None,
            message=message,
            sampled=at == len(said) - 1,
            timestamp=0.0,
        )
        for at, message in enumerate(said)
    ]
    return Trace(
        id="0" * 32,
        verifiers=VersionInfo(version=library_version()),
        task=TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=AgentConfig()),
        nodes=nodes,
        state=state_cls(type(task))(),
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
        timing=Timing(start=0.0),
    )


def _scores(hook: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, float]:
    from verifiers.v1.utils.decorators import invoke

    result = awaited(hook.__name__, invoke(hook, dict(given)))
    named = result if isinstance(result, Mapping) else {hook.__name__: result}
    return {name: float(score) for name, score in named.items()}
