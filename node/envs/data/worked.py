"""Rows of a file as prompts with worked answers, for supervised training."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from node.envs.data.items import canonical_json
from node.envs.data.readers import read_rows
from node.interfaces.prompts import Prompt, PromptMessage
from swarm.errors import ConfigError

QUESTIONS: Final = ("question", "prompt", "problem", "instruction")
ANSWERS: Final = ("answer", "solution", "response", "completion", "output")
CHATS: Final = ("messages", "conversations")
_ROLES: Final = {"human": "user", "gpt": "assistant"}  # of ShareGPT, which has from and value


class Worked(NamedTuple):
    """A prompt as `Prompt.text`, and the text of the whole answer."""

    prompt: str
    answer: str


class PromptRules(NamedTuple):
    """The columns by name, and what prompts begin with. An empty name: one of the usual columns."""

    question: str = ""
    answer: str = ""
    system: str = ""  # a chat's own system message replaces it
    examples: tuple[tuple[str, str], ...] = ()  # questions and completions before each question


def read_worked(path: Path, rules: PromptRules) -> list[Worked]:
    """The worked answers of a file or folder; ConfigError for the first row without one."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file; name one of worked answers")
    found = list(_worked(path, rules))
    if not found:
        raise ConfigError(f"{path}: no rows; write one JSON object a line")
    return found


def _worked(path: Path, rules: PromptRules) -> Iterator[Worked]:
    for where, row in read_rows(path, None):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where}: not an object; write one JSON object a line")
        try:
            prompt, answer = _of(row, rules)
            f"{prompt.text}{answer}".encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{where}: half a character (a surrogate); correct it") from None
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if Prompt.read(prompt.text) != prompt:
            raise ConfigError(f"{where}: its question begins with a control character")
        yield Worked(prompt.text, answer)


def _of(row: Mapping[str, Any], rules: PromptRules) -> tuple[Prompt, str]:
    """The prompt and answer of a row; ValueError says why it has none."""
    chat = next((row[name] for name in CHATS if row.get(name) is not None), None)
    if chat is not None and not (rules.question or rules.answer):
        return _of_chat(chat, rules)
    use, question = _column(row, "question", (rules.question,) if rules.question else QUESTIONS)
    _, answer = _column(row, "answer", (rules.answer,) if rules.answer else ANSWERS)
    if use == "instruction" and row.get("input"):
        question = f"{question}\n\n{row['input']}"  # Alpaca's rows keep their material apart
    return Prompt.of(question, rules.system, rules.examples), answer


def _column(row: Mapping[str, Any], use: str, names: tuple[str, ...]) -> tuple[str, str]:
    """The name and text of the first of these columns that the row has."""
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        text = value if isinstance(value, str) else canonical_json(value)
        if isinstance(value, list | dict) or not text.strip():
            raise ValueError(f"its column {name} is no text or empty; name another by --{use}")
        return name, text
    there = ", ".join(map(str, row)) or "none"
    raise ValueError(f"no {use}: the columns are {there}; name one by --{use}")


def _of_chat(chat: Any, rules: PromptRules) -> tuple[Prompt, str]:
    if not isinstance(chat, list) or not all(isinstance(each, Mapping) for each in chat):
        raise ValueError("its chat is no list of messages")
    said = []
    for each in chat:
        role = str(each.get("role", each.get("from")))
        content = each.get("content", each.get("value"))
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"its chat has a message of {role} without text")
        said.append(PromptMessage(_ROLES.get(role, role), content))
    roles = [each.role for each in said]
    opened = roles[:1] == ["system"]
    turns = roles[opened:]
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("its chat must be turns of user and assistant, the last the assistant's")
    opening = () if opened else Prompt.of("", rules.system, rules.examples).messages[:-1]
    return Prompt((*opening, *said[:-1])), said[-1].content
