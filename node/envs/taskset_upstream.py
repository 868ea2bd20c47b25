"""The adapter of `verifiers`. The only file that imports it, at the first problem in the verifier's
process, since the import takes seconds and 200 MB.

Rewards are computed as the library's `Task.score` does, but without an event loop, for which a
sandbox has no sockets: a grader may await another grader only.
"""

import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from node.envs.called_games import CalledGame
from node.envs.game_check import trail_of
from node.envs.method_calls import MethodCall, described
from node.envs.package_identity import PackageFindings
from node.envs.package_rules import LOADED_MAX, TASKS_MAX, awaited
from node.envs.taskset_rules import (
    NAME,
    TOOLS_NAME,
    TasksetRules,
    ToolTasksetRules,
    library_version,
    rules_of,
    tool_rules_of,
    wrong,
)
from swarm.texts import printable

CHECKED_TASKS: Final = 16  # tasks whose own answer is graded
FIELDS_SHOWN_MAX: Final = 12
NEAR: Final = 1e-9  # rounding error of weights such as 0.7, 0.2 and 0.1
_ADVICE: Final = re.compile(r"\n *For further information visit \S+")  # names pydantic's version
_HOOKS: Final = ("setup", "finalize", "stage_verifier")  # need a machine of their own


class ForeignTask:
    def __init__(self, task: Any, place: int, rules: TasksetRules) -> None:
        self.place = place
        self.prompt = _prompt(task)
        self.hash = str(task.hash)
        self.answer = _answer(task, rules)
        self.task = task

    def worth(self, reply: str) -> float:
        """The weighted sum of the taskset's rewards of one reply."""
        from verifiers.v1.types import AssistantMessage

        return self.graded([AssistantMessage(content=reply)], _state_of(self.task))

    def graded(self, said: Sequence[Any], state: Any) -> float:
        """As `worth`, of all messages after the prompt."""
        trace = _trace_of(self.task, said, state)
        given = {"task": self.task.data, "trace": trace}
        for hook in self.task.hooks("metric"):
            trace.record_metrics(_scores(hook, given))
        for hook in self.task.hooks("reward"):
            weight = getattr(hook, "_vf_weight", 1.0)
            for name, score in _scores(hook, given).items():
                trace.record_reward(name, score, weight)
        total = float(trace.reward)
        return float(round(total)) if abs(total - round(total)) < NEAR else total


@lru_cache(maxsize=LOADED_MAX)
def loaded(parameters: str) -> tuple[ForeignTask, ...]:
    """The tasks of a run's parameters; ConfigError if what is installed makes others."""
    rules = rules_of(parameters)
    tasks = _load(rules)[1]
    rules.check_hash(rules.sha256, _hash_of(rules, tasks))
    return tasks


def check(rules: TasksetRules, again: bool = False) -> PackageFindings:
    """The hash of a taskset's package, configuration and tasks, and what games with its tools were;
    ConfigError if it is refused. `again`: the last game first."""
    if isinstance(rules, ToolTasksetRules):
        return _with_tools(rules, again=again)[1]
    tasks = _load(rules)[1]
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
    return PackageFindings(_hash_of(rules, tasks))


@lru_cache(maxsize=LOADED_MAX)
def loaded_with_tools(parameters: str) -> "ToolSource":
    """As `loaded`, with the taskset's tools."""
    rules = tool_rules_of(parameters)
    source, seen = _with_tools(rules)
    rules.check_hash(rules.sha256, seen.sha256)
    return source


def _with_tools(
    rules: ToolTasksetRules, *, again: bool = False
) -> "tuple[ToolSource, PackageFindings]":
    taskset, tasks = _load(rules)
    with rules.foreign_code("cannot set its tools up"):
        source = ToolSource(rules, taskset, tasks)
    trail = trail_of(source, rules.turns, again=again)
    return source, PackageFindings(_hash_of(rules, tasks, [source.told, trail]), trail)


def _hash_of(rules: TasksetRules, tasks: tuple[ForeignTask, ...], more: Sequence[Any] = ()) -> str:
    told: list[Any] = [
        library_version(),
        rules.digest(),
        rules.model_dump(mode="json", exclude={"sha256"}),
        [[each.hash, each.prompt, each.answer] for each in tasks],
        *more,
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


# --- what a taskset is ------------------------------------------------------------------------


def _load(rules: TasksetRules) -> tuple[Any, tuple[ForeignTask, ...]]:
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
        _check_tools(rules, source, found[0])
        if reason := _refusal(found):
            raise rules.refusal(f"{reason}, so that strangers could not work out its rewards")
        return source, tuple(ForeignTask(task, at, rules) for at, task in enumerate(found))


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


def _toolsets(source: Any, task: Any) -> list[tuple[Any, bool]]:
    """New tool servers of a task, and whether each is the task's own."""
    shared = type(source).toolsets(source.config)
    own = type(task).toolsets(task.config)
    return [*((each, False) for each in shared), *((each, True) for each in own)]


def _check_tools(rules: TasksetRules, source: Any, task: Any) -> None:
    from verifiers.v1.mcp.toolset import Toolset

    toolsets = [each for each, _ in _toolsets(source, task)]
    if not isinstance(rules, ToolTasksetRules):
        if toolsets:
            raise rules.refusal(f"it needs tool servers; name the environment {TOOLS_NAME}")
        return
    if not toolsets:
        raise rules.refusal(f"has no tools; name the environment {NAME}")
    for each in toolsets:
        if each.config.url or getattr(each.config, "colocated", False):
            raise rules.refusal(f"the tool server {type(each).__name__} is on another machine")
        if type(each).register is not Toolset.register:
            raise rules.refusal(f"{type(each).__name__} registers its tools in a way of its own")


def _refusal(tasks: list[Any]) -> str | None:
    """The reason why a reward depends on more than one reply's text; None: it does not."""
    from verifiers.v1.task import Task

    kind = type(tasks[0])
    if any(type(each) is not kind or each.config != tasks[0].config for each in tasks):
        return "its tasks are of several types or configurations"
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


def _state_of(task: Any) -> Any:
    from verifiers.v1.state import state_cls

    return state_cls(type(task))()


def _trace_of(task: Any, replies: Sequence[Any], state: Any) -> Any:
    """The library's record of a policy that replied and stopped. `replies`: its messages, and the
    results of its calls."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Timing, Trace, TraceTask, VersionInfo
    from verifiers.v1.types import SystemMessage, UserMessage

    data = task.data
    said: list[Any] = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        said.append(UserMessage(content=data.prompt))
    else:
        said += data.prompt
    begins = len(said)
    said += replies
    nodes = [
        MessageNode(
            parent=at - 1 if at else None,
            message=message,
            sampled=at >= begins and message.role == "assistant",
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
        state=state,
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


# --- tools ----------------------------------------------------------------------------------------


class ToolSource:
    """A taskset whose tool servers run in this process."""

    def __init__(
        self, rules: ToolTasksetRules, taskset: Any, tasks: tuple[ForeignTask, ...]
    ) -> None:
        self.rules = rules
        self.tasks = tasks
        self._taskset = taskset
        tools = self.tools_of(tasks[0].task, _state_of(tasks[0].task))
        self.schemas = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for name, tool in tools.items()
        ]
        self.told = described(self.schemas)

    @property
    def count(self) -> int:
        return len(self.tasks)

    def tools_of(self, task: Any, state: Any) -> dict[str, Any]:
        """New tools by name, as the library's servers have them. They share a state."""
        from mcp.server.mcpserver.tools.base import Tool
        from verifiers.v1.utils.decorators import discover_decorated

        async def pull() -> Any:
            return state

        async def push(before: bytes) -> None:
            """The state is the object itself."""

        found: dict[str, Any] = {}
        for toolset, is_own in _toolsets(self._taskset, task):
            toolset._pull_state, toolset._push_state = pull, push
            awaited("setup", toolset.setup())
            if is_own:
                awaited("setup_task", toolset.setup_task(task))
            for method in discover_decorated(toolset, "tool"):
                name = getattr(method, "tool_name", None) or method.__name__
                told = (method.__doc__ or "").strip() or None
                tool = Tool.from_function(toolset._with_state(method), name=name, description=told)
                full = f"{toolset.server_name}_{name}" if toolset.server_name else name
                if full in found:
                    raise ValueError(f"two tools are called {full}")
                found[full] = tool
        return found

    def game(self, number: int, seed: str) -> "ToolGame":
        del seed  # whatever is left to chance is refused
        with self.rules.foreign_code(f"the game of task {number + 1} cannot begin"):
            return ToolGame(self, self.tasks[number])

    def right(self, number: int) -> tuple[str, ...]:
        return (self.rules.reply_of(self.tasks[number].answer),)


class ToolGame(CalledGame):
    def __init__(self, source: ToolSource, foreign: ForeignTask) -> None:
        super().__init__()
        self._foreign = foreign
        self._state = _state_of(foreign.task)
        self._tools = source.tools_of(foreign.task, self._state)
        self.prompt = f"{source.told}\n\n{foreign.prompt}"

    def called(self, call: MethodCall) -> Any:
        if call.name not in self._tools:
            return f"error: unknown tool {call.name!r}"
        if not isinstance(call.arguments, Mapping):
            return "error: tool arguments must be a JSON object; resend as an object"
        run = self._tools[call.name].run(dict(call.arguments), None, convert_result=True)
        blocks = awaited(call.name, run).content
        return "\n".join(each.text if each.type == "text" else str(each) for each in blocks)

    def failure(self, error: BaseException) -> Any:
        return _ADVICE.sub("", str(error))

    def reward(self) -> float:
        return self._foreign.graded(list(map(_message, self.completion)), self._state)


def _message(said: Mapping[str, Any]) -> Any:
    from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage

    if said["role"] == "tool":
        return ToolMessage(tool_call_id=said["name"], content=said["content"], name=said["name"])
    if "tool_calls" not in said:
        return AssistantMessage(content=said["content"])
    functions = [each["function"] for each in said["tool_calls"]]
    calls = [
        ToolCall(id=each["name"], name=each["name"], arguments=json.dumps(each["arguments"]))
        for each in functions
    ]
    return AssistantMessage(content=said["content"].partition("<tool_call>")[0], tool_calls=calls)
