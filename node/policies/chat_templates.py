"""Chat templates, which are programs that come with a model, rendered in a process of their own
with little memory and CPU time. It compiles them as transformers does, and imports neither that nor
torch: `python -m node.policies.chat_templates`."""

import json
import os
import resource
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from node.interfaces.prompts import PLAIN_RULES, ChatMessage, Takes, TemplateRules, takes_of
from node.sandbox.confinement import limit
from node.system.child_environment import child_environ
from swarm.errors import ConfigError
from swarm.texts import printable

CPU_S: Final = 2  # of one rendering; counted in whole seconds, so one more may pass
WALL_S: Final = 30.0  # a machine may have others to serve
MEMORY_BYTES: Final = 512 * 2**20  # of address space
CHARS_MAX: Final = 65_536  # of a rendering, beyond so many times what was said:
GROWTH_MAX: Final = 4
_LINE_CHARS: Final = 200
_READ_BYTES: Final = 65_536


class Renderer:
    """One template and its process, which starts with the first rendering."""

    def __init__(
        self,
        model: str,
        template: str,
        constants: Mapping[str, Any],
        rules: TemplateRules = PLAIN_RULES,
    ) -> None:
        """`constants`: names that the template may use beside messages; the run's replace them."""
        self.template = template
        self._model = model
        names = {**constants, **json.loads(rules.arguments)}
        self._opening = {"template": template, "constants": names, "date": rules.date}
        self._child: subprocess.Popen[bytes] | None = None
        self._in_parts = False  # contents are lists of parts, as `takes` finds

    @cached_property
    def takes(self) -> Takes:
        try:
            return takes_of(self._rendered, self._model)
        except ConfigError as error:
            self._in_parts = True
            try:
                return takes_of(self._rendered, self._model)
            except ConfigError:
                raise error from None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Messages, up to where the next reply begins. ConfigError: the template fails, or comes to
        a limit."""
        return self._rendered(messages, False)

    def _rendered(self, messages: Sequence[ChatMessage], is_over: bool) -> str:
        child = self._started()
        assert child.stdin is not None
        told: Sequence[Mapping[str, Any]] = messages
        if self._in_parts:
            told = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            child.stdin.write(json.dumps([told, is_over]).encode() + b"\n")
            child.stdin.flush()
            answer = json.loads(self._line_of(child))
        except (OSError, ValueError, TimeoutError):
            self._end(child)
            raise self._refusal(f"takes over {CPU_S} s, or ends the process that renders") from None
        if "text" not in answer:
            raise self._refusal(printable(answer["error"], _LINE_CHARS))
        return str(answer["text"])

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "node.policies.chat_templates"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environ() | {"TZ": "UTC", "LC_ALL": "C.UTF-8"},  # of dates
                start_new_session=True,  # Ctrl-C is not for it
            )
            weakref.finalize(self, _reap, self._child)
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(self._opening).encode() + b"\n")
        return self._child

    def _line_of(self, child: "subprocess.Popen[bytes]") -> bytes:
        assert child.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([child.stdout], [], [], WALL_S)
            part = os.read(child.stdout.fileno(), _READ_BYTES) if ready else b""
            if not part:
                raise TimeoutError
            line += part
        return line

    def _end(self, child: "subprocess.Popen[bytes]") -> None:
        _reap(child)
        self._child = None

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"model {self._model}: its chat template cannot be used: it {why}")


def _reap(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written is not wanted
                pipe.close()


# --- the child -----------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, and changes nothing of it."""

    tags = {"generation"}  # noqa: RUF012  so has jinja2 it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body)]


def compiled(template: str, date: str) -> jinja2.Template:
    """As transformers has it, on one date for all of a run."""
    now = datetime.fromisoformat(date).replace(tzinfo=UTC)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment.from_string(template)


def rendered(template: jinja2.Template, line: bytes, constants: Mapping[str, Any]) -> str:
    """The rendering of messages; OverflowError: it is longer than they explain."""
    messages, is_over = json.loads(line)
    room = CHARS_MAX + GROWTH_MAX * len(line)
    names = {"tools": None, "documents": None, **constants}
    parts: list[str] = []
    for part in template.generate(
        **names | {"messages": messages, "add_generation_prompt": not is_over}
    ):
        parts.append(part)
        room -= len(part)
        if room < 0:
            raise OverflowError(f"makes more than {GROWTH_MAX} times what it is given")
    made = "".join(parts)
    made.encode()  # half a character fits no tokenizer
    return made


def _answer(
    opening: Mapping[str, Any], made: dict[str, jinja2.Template], line: bytes
) -> dict[str, str]:
    try:
        if not made:
            made["template"] = compiled(opening["template"], opening["date"])
        return {"text": rendered(made["template"], line, opening["constants"])}
    except MemoryError:
        return {"error": f"takes over {MEMORY_BYTES >> 20} MiB"}
    except OverflowError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001  boundary: a template raises anything
        return {"error": f"fails: {type(error).__name__}: {error}"}


def main() -> None:
    limit(MEMORY_BYTES)
    opening = json.loads(sys.stdin.buffer.readline())
    made: dict[str, jinja2.Template] = {}
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_S, most))
        sys.stdout.write(json.dumps(_answer(opening, made, line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
