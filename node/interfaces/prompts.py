"""A prompt, and the one place that renders prompts to text and to tokens.

Between processes and peers a prompt is one text, `Prompt.text`; random numbers depend on it too.
`Prompt.read` is its inverse. A question alone is its own text; any other prompt is `MARK` and JSON.
"""

import json
import re
import unicodedata
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

    def chat(self, takes: "Takes | None" = None) -> list[ChatMessage]:
        """The messages for a chat template. What it does not take begins the question; None: it
        takes all."""
        has_turns = any(each.role == "assistant" for each in self.messages)
        if takes is not None and has_turns and not takes.turns:
            return [{"role": "user", "content": self.plain}]
        messages = [message._asdict() for message in self.messages]
        if takes is None or takes.system or messages[0]["role"] != "system":
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
    sound = all(
        isinstance(each.content, str) and isinstance(each.role, str) and each.role in _ROLES
        for each in found
    )
    if not sound or not any(each.role == "user" for each in found):
        return Prompt((PromptMessage("user", text),))
    if found[-1].role == "assistant":
        return Prompt(tuple(found[:-1]), found[-1].content)
    return Prompt(tuple(found))


# --- tokens --------------------------------------------------------------------------------------


DATE: Final = "2026-01-01"
THOUGHT_MARKS: Final = ("<think>", "</think>")  # of nearly all models that think


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """A run's values for chat templates beside messages."""

    arguments: str = "{}"  # JSON object: names that they may use, such as `enable_thinking`
    date: str = DATE  # YYYY-MM-DD, for those that tell the date


PLAIN_RULES: Final = TemplateRules()


@dataclass(frozen=True, slots=True)
class Thinking:
    """A run's rule for thoughts before answers."""

    end: str = THOUGHT_MARKS[1]  # the answer is what follows it
    tokens_max: int | None = None  # of a thought; None: as many as of a completion
    forced: bool = False  # a longer thought is ended by the engine; else the completion is cut


class Takes(NamedTuple):
    """A chat template's properties, found by rendering placeholders."""

    system: bool  # it renders the system's message
    turns: bool  # it renders earlier questions and replies
    around_reply: tuple[str, str]  # between a turn and a reply, and after it; empty without `turns`
    end: str  # after a turn that ends a conversation
    begin: str  # after the question, where the policy's turn begins
    own: str  # all of its own text

    @property
    def opens_thought(self) -> bool:
        opened, closed = THOUGHT_MARKS
        return opened in self.begin and closed not in self.begin.rpartition(opened)[2]


class TemplateRenderer(Protocol):
    """A chat template."""

    @property
    def takes(self) -> Takes:
        """ConfigError: it fails, or leaves the question out."""
        ...

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Messages, up to where the policy's next turn begins."""
        ...


class AddedToken(Protocol):
    """A token that a tokenizer finds before it splits a text."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class PromptEncoder:
    """Token ids of prompts and transcripts, by a model's tokenizer and chat template."""

    name: str  # of the model
    context_tokens: int
    eos_ids: Collection[int]  # any of them ends a completion
    eos_id: int  # ends what the model says by itself
    control: tuple[object, Mapping[int, AddedToken]] | None  # of a chat template

    @property
    def chat_template(self) -> str | None:
        raise NotImplementedError

    def template_renderer(self) -> TemplateRenderer:
        raise NotImplementedError

    def added_tokens(self) -> Mapping[int, AddedToken]:
        raise NotImplementedError

    def encode_split(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are neither added nor recognised."""
        raise NotImplementedError

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text. Special tokens and those of roles are neither added
        nor recognised, so text from strangers cannot hold any. Others that a tokenizer has added,
        such as `<think>`, are what the model itself says."""
        roles = [token.content for token in self.control_tokens().values() if not token.special]
        return [token for part in _cut(text, roles) for token in self.encode_split(part)]

    def is_written(self, text: str, token_ids: Sequence[int]) -> bool:
        """True if the ids of a text say all of it: no character became an unknown token. Blanks
        may differ, which many tokenizers normalise, and so may forms of one letter."""
        back = self.decode(token_ids)
        return text == back or _letters(text) == _letters(back)

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

    def control_tokens(self) -> Mapping[int, AddedToken]:
        """Added tokens that text may not hold: those marked special, and those that the chat
        template writes between messages. Marks of thoughts are none: policies write them."""
        template = self.chat_template
        if self.control is None or self.control[0] != template:
            own = self.template_renderer().takes.own if template else ""
            found = {
                number: token
                for number, token in self.added_tokens().items()
                if token.special or _is_mark(token.content, own)
            }
            self.control = (template, found)
        return self.control[1]

    def find_ends(self, named: Iterable[object]) -> tuple[frozenset[int], int | None]:
        """All tokens that end a completion, and the one that the model itself ends a turn with;
        None: there is none. `named`: ids and lists of ids, the tokenizer's own first."""
        told = [each if isinstance(each, list) else [each] for each in named]
        numbers = [number for each in told for number in each]
        ids = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
        last = ids[0] if ids else None
        if self.chat_template:
            takes, added = self.template_renderer().takes, self.added_tokens()
            for text, known in ((takes.end, added), (takes.around_reply[0], ids)):
                found = self.encode_special(text.lstrip())[:1]
                if found and found[0] in known:
                    return frozenset([*ids, *found]), found[0]
        return frozenset(ids), last

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt's text, at least one: by the chat template if there is one, else
        plain with the tokenizer's special tokens. Special tokens in messages stay text. The
        beginning comes last, as far as it leaves room for a token."""
        said = Prompt.read(prompt)
        ids = self._encode_chat(said) if self.chat_template else self._unended(said.plain)
        ids = ids or [self.eos_id]
        if not said.continued:
            return ids
        room = max(0, self.context_tokens - 1 - len(ids))
        return [*ids, *self.encode_completion(said.continued)[:room]]

    def _unended(self, text: str) -> list[int]:
        """A plain text's ids without an end, which some tokenizers add."""
        ids = self.encode_plain(text)
        while len(ids) > 1 and ids[-1] in self.eos_ids:
            del ids[-1]
        return ids

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
            _, after = around(self.encode_completion(word), self._unended(word))
            return [*plain, *after] if after else self.encode_completion(f"\n{reply}\n")
        takes = self.template_renderer().takes
        if not takes.turns:
            raise ConfigError(
                f"model {self.name}: its chat template leaves out what was said before; a run with "
                "turns needs another model"
            )
        end, begin = takes.around_reply
        ending = self.encode_special(end)
        at = next((at for at, token in enumerate(ending) if token in self.eos_ids), None)
        if at is not None and not self.decode(ending[:at]).strip():
            ending = ending[at + 1 :]  # it was sampled
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

    def _encode_chat(self, said: Prompt) -> list[int]:
        """Render, and encode so that the template's special tokens count and those in a message do
        not: these are cut in two."""
        renderer = self.template_renderer()
        messages = [
            {**message, "content": SEAM.join(self._without_control(message["content"]))}
            for message in said.chat(renderer.takes)
        ]
        parts = renderer.render(messages).split(SEAM)
        return [token for part in parts for token in self.encode_special(part)]

    def _without_control(self, text: str) -> list[str]:
        """The parts of a text of which none becomes a control token."""
        control = self.control_tokens()
        parts = _cut(text, [token.content for token in control.values()])
        # Some tokenizers find them in forms of their letters, such as wide ones
        if text.isascii() or all(
            control.keys().isdisjoint(self.encode_special(part)) for part in parts
        ):
            return parts
        return list(text)


def _is_mark(token: str, own: str) -> bool:
    """True for a token that a template writes, unless it is a word, a blank or of a thought."""
    is_word = token.isspace() or token.isalnum()
    return token in own and not is_word and token not in THOUGHT_MARKS


def _letters(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _cut(text: str, tokens: Iterable[str]) -> list[str]:
    """The parts of a text, cut after the first character of each of these tokens in it."""
    there = sorted((token for token in tokens if len(token) > 1 and token in text), key=len)
    parts, begin = [], 0
    if there:
        pattern = "|".join(map(re.escape, reversed(there)))
        for found in re.finditer(f"(?={pattern})", text):
            parts.append(text[begin : found.start() + 1])
            begin = found.start() + 1
    return [*parts, text[begin:]]


def placeholder(number: int) -> str:
    """A word of digits that no template contains, in place of a message."""
    return f"7310592846{number:04}"


SEAM: Final = placeholder(9)  # where a message's text is cut, until it is rendered
_PLACES: Final = tuple(placeholder(number) for number in range(3))


def takes_of(render: Callable[[Sequence[ChatMessage], bool], str], model: str) -> Takes:
    """A chat template's properties. `render` has True for a conversation that is over. ConfigError:
    it fails with a question alone, or leaves it out."""
    first, second, third = _PLACES

    def rendered(*said: tuple[str, str], is_over: bool = False) -> str:
        """The rendering of these messages; empty: the template drops one."""
        found = render([{"role": role, "content": content} for role, content in said], is_over)
        return found if all(content in found for _, content in said) else ""

    def tried(*said: tuple[str, str], is_over: bool = False) -> str:
        try:
            return rendered(*said, is_over=is_over)
        except ConfigError:
            return ""

    alone = rendered(("user", first))
    if not alone:
        raise ConfigError(f"model {model}: its chat template leaves out the question")
    told = tried(("system", first), ("user", second))
    asked = tried(("user", first), ("assistant", second), ("user", third))
    over = tried(("user", first), ("assistant", second), is_over=True)
    end, _, begin = asked.partition(second)[2].partition(third)
    if any(place in end + begin for place in _PLACES):  # it tells a message twice
        asked = end = begin = ""
    own = re.sub("|".join(_PLACES), "\0", "\0".join((alone, told, asked, over)))
    return Takes(
        system=bool(told),
        turns=bool(asked),
        around_reply=(end, begin),
        end=over.partition(second)[2],
        begin=alone.rpartition(first)[2],
        own=own,
    )


def around(plain: Sequence[int], ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after those of a text alone (`plain`); empty if it is not found."""
    for at in range(len(ids) - len(plain) + 1):
        if list(ids[at : at + len(plain)]) == list(plain):
            return tuple(ids[:at]), tuple(ids[at + len(plain) :])
    return (), ()
