"""Rows of a file as prompts with worked answers, for supervised training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from node.envs.data.items import LeftOut, Unread, canonical_json, left_out_lines
from node.envs.data.readers import read_rows
from node.envs.data.shapes import messages_of
from node.interfaces.prompts import Prompt
from swarm.errors import ConfigError

QUESTIONS: Final = ("question", "prompt", "problem", "instruction")
ANSWERS: Final = ("answer", "solution", "response", "completion", "output")
CHATS: Final = ("messages", "conversations")


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


def read_worked(path: Path, rules: PromptRules, say: Callable[[str], None]) -> list[Worked]:
    """The worked answers of a file or folder. Rows without one are left out and told; ConfigError
    if that leaves none."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file; name one of worked answers")
    found: list[Worked] = []
    left_out: list[LeftOut] = []
    for where, row in read_rows(path, None):
        try:
            found.append(_worked(row, rules))
        except ValueError as error:
            left_out.append(LeftOut(where, str(error)))
    if not found:
        first = "; ".join(f"{where}: {why}" for where, why in left_out[:1])
        raise ConfigError(f"{path}: no rows; {first or 'write one JSON object a line'}")
    for line in left_out_lines(path.name, left_out, len(found)):
        say(line)
    return found


def _worked(row: Any, rules: PromptRules) -> Worked:
    """The worked answer of a row; ValueError says why it has none."""
    if not isinstance(row, Mapping):
        is_told = isinstance(row, Unread)
        raise ValueError(row.why if is_told else "not an object")  # noqa: TRY004
    prompt, answer = _of(row, rules)
    try:
        f"{prompt.text}{answer}".encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a surrogate); correct it") from None
    if Prompt.read(prompt.text) != prompt:
        raise ValueError("its question begins with a control character")
    return Worked(prompt.text, answer)


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
    said = messages_of(chat)
    if said[-1].role != "assistant" or len(said) < 2 or said[-2].role != "user":
        raise ValueError("its chat must end in an answer of the assistant")
    return Prompt(tuple(said[:-1])).below(rules.system, rules.examples), said[-1].content
