"""A prompt, and the one place that renders prompts to text and to tokens.

Between processes, in pools and in `swarm` a prompt is one text, `Prompt.text`, which nobody there
takes apart; random numbers are drawn by it as well. `Prompt.read` is its inverse. A question alone
is its own text. Any other prompt is `MARK` and JSON.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from swarm.errors import ConfigError

MARK: Final = "\x1e"  # ASCII's record separator; data sets may not have a question that begins so
NO_TEXT: Final = "\N{REPLACEMENT CHARACTER}"  # in a completion, for a token that has no text
_ROLES: Final = frozenset({"system", "user", "assistant"})
_READ_MAX: Final = 4096  # prompts kept decoded

ChatMessage = dict[str, str]  # `role` and `content`, as chat templates and servers take it
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


class PromptMessage(NamedTuple):
    """One message of a prompt."""

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
        """The prompt of a question. `examples`: pairs of question and completion."""
        told = [PromptMessage("system", system)] if system else []
        shown = [
            each
            for q, c in examples
            for each in (PromptMessage("user", q), PromptMessage("assistant", c))
        ]
        return cls((*told, *shown, PromptMessage("user", question)))

    @classmethod
    def read(cls, text: str) -> "Prompt":
        """The prompt of a text. A text that is not what `Prompt.text` writes is a question."""
        return _read(text)

    @property
    def text(self) -> str:
        """The whole prompt as one text."""
        if len(self.messages) == 1 and not self.beginning:
            return self.messages[0].content
        last = [PromptMessage("assistant", self.beginning)] if self.beginning else []
        return MARK + json.dumps([*self.messages, *last], ensure_ascii=False, separators=(",", ":"))

    def begun(self, beginning: str) -> "Prompt":
        """This prompt with a beginning for its completions."""
        return replace(self, beginning=beginning)

    @property
    def question(self) -> str:
        """The question alone."""
        return self.messages[-1].content

    @property
    def continued(self) -> str:
        """The beginning that a policy continues: without white space at its end, because tokens
        hold words together with the gaps before them."""
        return self.beginning.rstrip()

    def whole(self, text: str) -> str:
        """The full text of a completion, with what it continues."""
        return self.continued + text

    def chat(self, *, with_system: bool = True) -> list[ChatMessage]:
        """The messages for a chat template. Without `with_system` the system message is put before
        the first question, for templates that have no such role."""
        messages = [message._asdict() for message in self.messages]
        if with_system or messages[0]["role"] != "system":
            return messages
        told, first, *others = messages
        return [{**first, "content": f"{told['content']}\n\n{first['content']}"}, *others]

    @property
    def plain(self) -> str:
        """The prompt for a policy without a chat template. After worked examples the answer begins
        on a line of its own, as in the examples."""
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
        """The template's own text."""
        raise NotImplementedError

    def template_renderer(self) -> TemplateRenderer:
        """The chat template, ready for use."""
        raise NotImplementedError

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text: special tokens are neither added nor recognised, so
        that text from elsewhere cannot hold any."""
        raise NotImplementedError

    def encode_special(self, text: str) -> list[int]:
        """Token ids of a template's own text, in which special tokens count."""
        raise NotImplementedError

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text with the tokenizer's own special tokens around it."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion without the EOS that ends it. Other special tokens are spelled
        out, and a token without text is `NO_TEXT`: what a scorer cannot see could be taught."""
        raise NotImplementedError

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Messages by the chat template, up to where the policy's next turn begins.

        Raises:
            ConfigError: the template fails, or comes to a limit.
        """
        return self.template_renderer().render(messages)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt's text: its messages through the chat template where there is one,
        else its plain text with the tokenizer's own special tokens. Special tokens spelled out in
        the prompt stay text. The beginning of a completion comes last, as far as it leaves room for
        a token. At least one token."""
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
        """Token ids of a prompt and its turns so far: sampled ids, each with the reply to them.

        Raises:
            ConfigError: as `between_turns`.
        """
        ids = self.encode_prompt(prompt)
        for sampled, reply in turns:
            ids += [*sampled, *self.between_turns(reply)]
        return ids

    def between_turns(self, reply: str) -> list[int]:
        """The ids between a turn of the policy's that ended by itself, its end token included, and
        its next one. They are rendered by difference: nothing that came before is rendered again,
        so a chat template that rewrites earlier turns changes none.

        Raises:
            ConfigError: the chat template leaves out what it is given.
        """
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
        """The text of a prompt's completion; see `decode`."""
        return decoded(prompt, token_ids, self.encode_completion, self.decode)

    def _encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        """The template's special tokens count, those that a message spells out do not."""
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


def decoded(prompt: str, ids: Sequence[int], encode: Encode, decode: Decode) -> str:
    """The text of a completion's ids. Behind a beginning it is what these ids add to it: some
    tokenizers lose the gap that a text begins with, and then tokens alone do not say whether the
    policy made one."""
    if not (beginning := Prompt.read(prompt).continued):
        return decode(list(ids))
    before = list(encode(beginning))
    alone, both = decode(before), decode([*before, *ids])
    return both.removeprefix(alone) if both.startswith(alone) else decode(list(ids))


def takes_system(chat_template: str | Mapping[str, str] | None) -> bool:
    """True if a chat template has a place for the system message. One that does not either never
    names that role or raises an error that says so."""
    text = chat_template if isinstance(chat_template, str) else str(chat_template or "")
    return "system" in text and "not supported" not in text.lower()


def placeholder(number: int) -> str:
    """A word that no template has, which stands for a message in it."""
    return f"0cd1e2a7{number:04}"


_PLACES: Final = tuple(placeholder(number) for number in range(3))
TWO_TURNS: Final[list[ChatMessage]] = [
    {"role": role, "content": place}
    for role, place in zip(("user", "assistant", "user"), _PLACES, strict=True)
]


def around_reply(rendered: str) -> tuple[str, str] | None:
    """The texts that a chat template puts between a policy's turn and a reply, and behind the
    reply; None: it leaves one of them out. `rendered`: `TWO_TURNS`, up to the next turn."""
    _, said, place = _PLACES
    _, found, rest = rendered.partition(said)
    end, found_reply, begin = rest.partition(place)
    return (end, begin) if found and found_reply else None


def around(plain: Sequence[int], ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and behind those of a text alone (`plain`); none where they are not in it."""
    for at in range(len(ids) - len(plain) + 1):
        if list(ids[at : at + len(plain)]) == list(plain):
            return tuple(ids[:at]), tuple(ids[at + len(plain) :])
    return (), ()
