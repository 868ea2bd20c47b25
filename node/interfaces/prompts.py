"""A prompt, and the one place that renders prompts to text and to tokens.

Between processes and peers a prompt is one text, `Prompt.text`; random numbers depend on it too.
`Prompt.read` is its inverse. A question alone is its own text; any other prompt is `MARK` and JSON.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from swarm.errors import ConfigError

MARK: Final = "\x1e"  # ASCII's record separator; data sets may not have a question that begins so
NO_TEXT: Final = "\N{REPLACEMENT CHARACTER}"  # in a completion, for a token that has no text
_ROLES: Final = frozenset({"system", "user", "assistant"})
_READ_MAX: Final = 4096  # prompts kept decoded

ChatMessage = dict[str, str]  # `role` and `content`, as chat templates and servers take it


class PromptMessage(NamedTuple):
    role: str  # `system`, `user` or `assistant`
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages, the question last, and the text that completions begin with (a hint)."""

    messages: tuple[PromptMessage, ...]
    beginning: str = ""

    @classmethod
    def of(
        cls, question: str, system: str = "", examples: Sequence[tuple[str, str]] = ()
    ) -> "Prompt":
        told = [PromptMessage("system", system)] if system else []
        shown = [
            each
            for q, c in examples
            for each in (PromptMessage("user", q), PromptMessage("assistant", c))
        ]
        return cls((*told, *shown, PromptMessage("user", question)))

    @classmethod
    def read(cls, text: str) -> "Prompt":
        """The prompt of a text. A text that `Prompt.text` did not write is a question."""
        return _read(text)

    @property
    def text(self) -> str:
        """The whole prompt as one text."""
        if len(self.messages) == 1 and not self.beginning:
            return self.messages[0].content
        last = [PromptMessage("assistant", self.beginning)] if self.beginning else []
        return MARK + json.dumps([*self.messages, *last], ensure_ascii=False, separators=(",", ":"))

    def below(self, system: str, examples: Sequence[tuple[str, str]]) -> "Prompt":
        """The prompt after a run's instructions, which a system message of its own replaces."""
        if self.messages[0].role == "system":
            return self
        told = Prompt.of("", system, examples).messages[:-1]
        return replace(self, messages=(*told, *self.messages))

    def begun(self, beginning: str) -> "Prompt":
        return replace(self, beginning=beginning)

    def asking(self, question: str) -> "Prompt":
        """The prompt with another question."""
        last = PromptMessage(self.messages[-1].role, question)
        return replace(self, messages=(*self.messages[:-1], last))

    @property
    def question(self) -> str:
        return self.messages[-1].content

    @property
    def continued(self) -> str:
        """The beginning without white space at its end: tokens hold the gap before a word."""
        return self.beginning.rstrip()

    def whole(self, text: str) -> str:
        """The full text of a completion, with what it continues."""
        return self.continued + text

    def chat(self, *, with_system: bool = True) -> list[ChatMessage]:
        """The messages for a chat template; without `with_system` its text begins the first
        question."""
        messages = [message._asdict() for message in self.messages]
        if with_system or messages[0]["role"] != "system":
            return messages
        told, first, *others = messages
        return [{**first, "content": f"{told['content']}\n\n{first['content']}"}, *others]

    @property
    def plain(self) -> str:
        """The prompt without a template. After examples the answer begins on its own line."""
        parts = [
            f"{each.content}\n" if each.role == "user" else f"{each.content}\n\n"
            for each in self.messages[:-1]
        ]
        shown = any(each.role == "user" for each in self.messages[:-1])
        return "".join(parts) + self.question + ("\n" if shown else "")


@lru_cache(_READ_MAX)
def _read(text: str) -> Prompt:
    found: list[PromptMessage] = []
    if text.startswith(MARK):
        try:
            found = [PromptMessage(role, content) for role, content in json.loads(text[1:])]
        except (ValueError, TypeError, RecursionError):
            found = []
    # A beginning alone is no prompt: a question comes before it
    sound = all(each.role in _ROLES and isinstance(each.content, str) for each in found)
    if not sound or not any(each.role == "user" for each in found):
        return Prompt((PromptMessage("user", text),))
    if found[-1].role == "assistant":
        return Prompt(tuple(found[:-1]), found[-1].content)
    return Prompt(tuple(found))


# --- tokens --------------------------------------------------------------------------------------


class TemplateRenderer(Protocol):
    """A chat template."""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Messages, up to where the policy's next turn begins."""
        ...


class PromptEncoder:
    """Token ids of prompts and transcripts, by a model's tokenizer and chat template."""

    __slots__ = ()

    name: str  # of the model
    context_tokens: int
    eos_ids: Collection[int]  # any of them ends a completion
    eos_id: int

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        raise NotImplementedError

    def template_renderer(self) -> TemplateRenderer:
        raise NotImplementedError

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text. Special tokens are neither added nor recognised, so
        text from strangers cannot hold any."""
        raise NotImplementedError

    def encode_special(self, text: str) -> list[int]:
        """Token ids of a template's own text, in which special tokens count."""
        raise NotImplementedError

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text with the tokenizer's own special tokens around it."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion without its final EOS. Other special tokens are spelled out and
        a token without text is `NO_TEXT`, so that the scorer sees all of them."""
        raise NotImplementedError

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Messages by the chat template, up to where the policy's next turn begins."""
        return self.template_renderer().render(messages)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt's text, at least one: by the chat template if there is one, else
        plain with the tokenizer's special tokens. Special tokens in messages stay text. The
        beginning comes last, as far as it leaves room for a token."""
        said = Prompt.read(prompt)
        if self.chat_template:
            has_system = takes_system(self.chat_template)
            ids = self._encode_chat(said.chat(with_system=has_system))
        else:
            ids = self.encode_plain(said.plain)
        ids = ids or [self.eos_id]
        if not said.continued:
            return ids
        room = max(0, self.context_tokens - 1 - len(ids))
        return [*ids, *self.encode_completion(said.continued)[:room]]

    def encode_turns(self, prompt: str, turns: Iterable[tuple[Iterable[int], str]]) -> list[int]:
        """Token ids of a prompt and its turns so far: sampled ids, each with the reply to them."""
        ids = self.encode_prompt(prompt)
        for sampled, reply in turns:
            ids += [*sampled, *self.between_turns(reply)]
        return ids

    def between_turns(self, reply: str) -> list[int]:
        """The ids between a turn, its end token included, and the next one. They are rendered by
        difference, so a template that rewrites earlier turns changes none."""
        plain = self.encode_completion(reply)
        if not self.chat_template:
            word = placeholder(0)
            _, after = around(self.encode_completion(word), self.encode_plain(word))
            return [*plain, *after] if after else self.encode_completion(f"\n{reply}\n")
        found = around_reply(self.render(TWO_TURNS))
        if found is None:
            raise ConfigError(
                f"model {self.name}: its chat template leaves out what was said before; a run with "
                "turns needs another model"
            )
        end, begin = found
        ending = self.encode_special(end)
        if ending and ending[0] in self.eos_ids:
            ending = ending[1:]  # it was sampled
        return [*ending, *plain, *self.encode_special(begin)]

    def text_of(self, prompt: str, token_ids: Sequence[int]) -> str:
        """The text of a completion's ids. After a beginning it is what the ids add, because some
        tokenizers drop the space that a text begins with."""
        if beginning := Prompt.read(prompt).continued:
            before = self.encode_completion(beginning)
            alone, both = self.decode(before), self.decode([*before, *token_ids])
            if both.startswith(alone):
                return both.removeprefix(alone)
        return self.decode(token_ids)

    def _encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        """Encode so that the template's special tokens count and those in a message do not."""
        contents = [message["content"] for message in messages]
        plain = [self.encode_completion(content) for content in contents]
        if plain == [self.encode_special(content) for content in contents]:
            return self.encode_special(self.render(messages))  # tokens may span the seams
        places = [placeholder(number) for number in range(len(messages))]
        rest = self.render(
            [{**message, "content": at} for message, at in zip(messages, places, strict=True)]
        )
        ids: list[int] = []
        for place, tokens in zip(places, plain, strict=True):
            before, found, rest = rest.partition(place)
            if not found:  # a template that rewrites its content
                return self.encode_completion(self.render(messages))
            ids += [*self.encode_special(before), *tokens]
        return [*ids, *self.encode_special(rest)]


def takes_system(chat_template: str | Mapping[str, str] | None) -> bool:
    """True if a chat template supports the system role; others never name it or raise an error."""
    text = chat_template if isinstance(chat_template, str) else str(chat_template or "")
    return "system" in text and "not supported" not in text.lower()


def placeholder(number: int) -> str:
    """A word that no template contains, in place of a message."""
    return f"0cd1e2a7{number:04}"


_PLACES: Final = tuple(placeholder(number) for number in range(3))
TWO_TURNS: Final[list[ChatMessage]] = [
    {"role": role, "content": place}
    for role, place in zip(("user", "assistant", "user"), _PLACES, strict=True)
]


def around_reply(rendered: str) -> tuple[str, str] | None:
    """The texts of a chat template between a turn and a reply, and after the reply; None: it omits
    one. `rendered`: `TWO_TURNS`, up to the next turn."""
    _, said, place = _PLACES
    _, found, rest = rendered.partition(said)
    end, found_reply, begin = rest.partition(place)
    return (end, begin) if found and found_reply else None


def around(plain: Sequence[int], ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after those of a text alone (`plain`); empty if it is not found."""
    for at in range(len(ids) - len(plain) + 1):
        if list(ids[at : at + len(plain)]) == list(plain):
            return tuple(ids[:at]), tuple(ids[at + len(plain) :])
    return (), ()
