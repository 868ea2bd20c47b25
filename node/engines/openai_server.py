"""A server that speaks OpenAI's HTTP interface: llama.cpp, Ollama, vLLM, SGLang, MLX and others.

Answers are untrusted: they are read up to a bound and checked. `ServerTrouble` may pass and can be
tried again; a request that the server refuses is a `ConfigError`.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final, Literal, TypeGuard

import httpx
import trio

from node.interfaces.engine import Sampling
from node.interfaces.prompts import Prompt
from node.system.bounded_server import WholeBody
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import FinishReason
from swarm.texts import printable
from swarm.wire.messages import NAME_CHARS_MAX, TOKENS_MAX

Prompts = Literal["chat", "text"]

ANSWER_BYTES_MAX: Final = 8 * 2**20  # of one answer, log-probs included
REQUEST_TIMEOUT_S: Final = 600.0  # a server that has many requests answers the last one late
CONNECT_TIMEOUT_S: Final = 10.0
_LINE_CHARS: Final = 200
_PASSING: Final = frozenset({408, 425, 429})  # beside those of the server's own faults
_PRECISIONS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKENIZE: Final = "/tokenize"  # which is not of OpenAI's interface
_TOKEN_ID: Final = "token_id:"  # how vLLM spells a token whose number was asked for

# Parameters for sampling from the whole distribution and for token ids, by the server's own name
# in its list of models. The distribution of other servers is unknown.
_WHOLE: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm": {
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_tokens_as_token_ids": True,
    },
    "llamacpp": {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
    "sglang": {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
}  # fmt: skip


class ServerTrouble(ChildFailed):
    """The server gave no valid answer, but may recover. `wait_s`: the delay that it asks for, s."""

    def __init__(self, what: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Said:
    """One completion. `token_ids` and `logprobs` have equal lengths, both empty if one is
    unknown."""

    text: str
    finish_reason: FinishReason
    tokens: int  # that it sampled; 0: it does not say
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChatAsks:
    """A run's rules for a server's chats."""

    arguments: str = "{}"  # JSON object, of its chat template
    thought_end: str = ""  # empty: completions have no thoughts


PLAIN_ASKS: Final = ChatAsks()


class OpenAiServer:
    """Made by `open_server`."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, prompts: Prompts, asks: ChatAsks
    ) -> None:
        self._client = client
        self.url = url
        self._prompts = prompts
        self._asks = asks
        named = json.loads(asks.arguments)
        self._template: dict[str, Any] = {"chat_template_kwargs": named} if named else {}
        self.model = ""
        self.precision = ""  # of its weights, where it says: `float16`, or how they are quantised
        self._kind = ""  # what it calls itself

    @property
    def tells_logprobs(self) -> bool:
        """True if this kind of server can be made to sample from the whole distribution."""
        return self._kind in _WHOLE

    async def choose(self, wanted: str | None) -> None:
        """Select a model for further requests; None: the only one that the server has."""
        served = await self._served()
        if wanted is None and len(served) != 1:
            names = ", ".join(sorted(served)) or "none that it names"
            raise ConfigError(
                f"--engine-url {self.url}: it serves {printable(names, _LINE_CHARS)}: name one "
                "with --model"
            )
        if wanted is not None and served and wanted not in served:
            names = printable(", ".join(sorted(served)), _LINE_CHARS)
            raise ConfigError(f"--model {wanted}: {self.url} serves {names}")
        self.model = next(iter(served)) if wanted is None else wanted
        told = served.get(self.model, {})
        self._kind = str(told.get("owned_by", ""))
        meta = told.get("meta")
        kind = meta.get("ftype") if isinstance(meta, dict) else None  # of llama.cpp
        if isinstance(kind, str):
            self.precision = printable(_PRECISIONS.get(kind, kind.lower()), NAME_CHARS_MAX)

    @property
    def name(self) -> str:
        """The model's public name. llama.cpp uses a file's path, whose folder is private."""
        return printable(PurePath(self.model).name, NAME_CHARS_MAX)

    async def complete(self, prompt: str, sampling: Sampling, seed: int) -> Said:
        """One completion.

        Raises:
            ServerTrouble: no answer, or one that is no completion.
            ConfigError: it refuses such a request.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**31,
            "stream": False,
            **_WHOLE.get(self._kind, {}),
        }
        # Only then are the log-probs that servers tell those of what was sampled from
        known = self.tells_logprobs and sampling.is_whole and sampling.temperature == 1.0
        if self._prompts == "chat":
            body |= {"messages": Prompt.read(prompt).chat(), **self._template}
            body |= {"logprobs": True} if known else {}
            answer = await self._ask("POST", "/chat/completions", body)
        else:
            body |= {"prompt": Prompt.read(prompt).plain} | ({"logprobs": 1} if known else {})
            answer = await self._ask("POST", "/completions", body)
        return self._said(answer)

    async def tokens_of(self, prompt: str, *, is_bare: bool = False) -> list[int]:
        """Token ids of a prompt by the server's tokenizer and template, up to where a completion
        begins. `is_bare`: of the text alone. vLLM tells them. Raises as `complete`."""
        said = Prompt.read(prompt)
        asked: dict[str, Any] = {"prompt": said.plain}
        if is_bare:
            asked = {"prompt": prompt, "add_special_tokens": False}
        elif self._prompts == "chat":
            asked = {"messages": said.chat(), "add_generation_prompt": True, **self._template}
        answer = await self._ask("POST", _TOKENIZE, {"model": self.model, **asked})
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(map(_is_count, tokens)):
            raise ServerTrouble(f"{_TOKENIZE}: its answer has no tokens")
        return tokens

    async def logprobs_of(
        self, context: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[float, ...]:
        """Log-probs (natural) of given tokens after a context; empty: the server tells none. vLLM
        does. Raises as `complete`."""
        given = [*context, *token_ids]
        body = {
            "model": self.model,
            "prompt": given,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "stream": False,
        }
        answer = await self._ask("POST", "/completions", body)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        rows = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
        if not isinstance(rows, list) or len(rows) != len(given):
            return ()
        found = []
        for number, row in zip(token_ids, rows[len(context) :], strict=True):
            told = row.get(str(number)) if isinstance(row, dict) else None
            known = _row({**told, "id": number}) if isinstance(told, dict) else None
            if known is None:
                return ()
            found.append(known[1])
        return tuple(found)

    def _said(self, answer: Mapping[str, Any]) -> Said:
        """The completion of an answer. A thought that the server tells apart comes before its end
        and the answer, and no token is known then."""
        said, thought = _read(answer)
        if not thought:
            return said
        if not self._asks.thought_end:
            raise ConfigError(
                f"--engine-url {self.url}: it thinks, and tells thoughts apart "
                "(reasoning_content): give the run a table [thinking], or serve without thoughts"
            )
        is_over = bool(said.text) or said.finish_reason is FinishReason.STOP
        text = f"{thought}{self._asks.thought_end}{said.text}" if is_over else thought
        return replace(said, text=text, token_ids=(), logprobs=())

    async def _served(self) -> dict[str, dict[str, Any]]:
        """Models by name, each with the server's description of it."""
        answer = await self._ask("GET", "/models")
        listed = answer.get("data")
        models = listed if isinstance(listed, list) else []
        return {
            _whole(model["id"]): model
            for model in models
            if isinstance(model, dict) and isinstance(model.get("id"), str) and model["id"]
        }

    async def _ask(
        self, method: str, route: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            with trio.fail_after(REQUEST_TIMEOUT_S):
                status, headers, content = await self._answer(method, route, body)
        except trio.TooSlowError as error:
            raise ServerTrouble(f"{route}: no answer in {REQUEST_TIMEOUT_S:g} s") from error
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise ServerTrouble(f"{route}: {printable(what, _LINE_CHARS)}") from error
        if status >= httpx.codes.INTERNAL_SERVER_ERROR or status in _PASSING:
            told = headers.get("retry-after", "")  # or a date, which is ignored
            wait_s = min(float(told), 60.0) if told.isdecimal() and len(told) < 6 else 0.0
            raise ServerTrouble(f"{route}: status {status}{_reason(content)}", wait_s)
        if status != httpx.codes.OK:
            key = status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
            advice = "; name the variable that holds its key with --engine-key-env" if key else ""
            raise ConfigError(
                f"--engine-url {self.url}: {route}: status {status}{_reason(content)}{advice}"
            )
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ServerTrouble(f"{route}: its answer is no JSON object")
        return answer

    async def _answer(
        self, method: str, route: str, body: Mapping[str, Any] | None
    ) -> tuple[int, httpx.Headers, bytes]:
        """Status, headers and body; the body is read up to a bound."""
        base = self.url.removesuffix("/v1") if route == _TOKENIZE else self.url
        request = self._client.build_request(method, f"{base}{route}", json=body)
        request.stream = WholeBody(request.content)
        response = await self._client.send(request, stream=True)
        async with aclosing(response):
            if response.headers.get("content-encoding", "identity") != "identity":
                # What it would unpack to is not known before it is in memory
                raise ServerTrouble(f"{route}: it packs its answers, unasked")
            found = bytearray()
            with trio.CancelScope() as reading:
                async for part in response.aiter_raw():
                    found += part
                    if len(found) > ANSWER_BYTES_MAX:
                        reading.cancel()  # the generators of httpx end by that, not by leaving them
            if len(found) > ANSWER_BYTES_MAX:
                raise ServerTrouble(f"{route}: an answer of over {ANSWER_BYTES_MAX >> 20} MiB")
            return response.status_code, response.headers, bytes(found)


@asynccontextmanager
async def open_server(
    url: str, key: str | None, prompts: Prompts, requests_max: int, asks: ChatAsks
) -> AsyncIterator[OpenAiServer]:
    """A server by its base URL, such as `http://127.0.0.1:8080/v1`. `key`: the bearer token."""
    headers = {"accept-encoding": "identity"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(
        headers=headers,
        limits=httpx.Limits(max_connections=requests_max),
        timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
        trust_env=False,  # a proxy of the environment is hardly meant for it
    ) as client:
        yield OpenAiServer(client, url.rstrip("/"), prompts, asks)


def _read(answer: Mapping[str, Any]) -> tuple[Said, str]:
    """The completion of an answer, and a thought that is told apart."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise ServerTrouble("the server's answer has no choices")
    message = choice.get("message")
    text, thought = choice.get("text") if message is None else None, ""
    if isinstance(message, dict):
        text = message.get("content")
        text = "" if text is None else text  # such as where it thought up to the limit
        told = message.get("reasoning_content") or message.get("reasoning")
        thought = _whole(told) if isinstance(told, str) else ""
        if message.get("tool_calls") and not text:
            raise ConfigError("the server's model calls tools in place of an answer; give it none")
    if not isinstance(text, str):
        raise ServerTrouble("the server's answer has no text")
    ends = choice.get("finish_reason") == "stop"
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    token_ids, logprobs = _columns(choice.get("logprobs"))
    said = Said(
        text=_whole(text),
        finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
        tokens=count if _is_count(count) and count <= TOKENS_MAX else len(token_ids),
        token_ids=token_ids,
        logprobs=logprobs,
    )
    return said, thought


def _whole(text: str) -> str:
    """JSON may spell half a character, which no peer could be sent."""
    return text.encode(errors="replace").decode()


def _columns(told: object) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and their log-probs; empty if any of them is missing."""
    nothing: tuple[tuple[int, ...], tuple[float, ...]] = (), ()
    if not isinstance(told, dict):
        return nothing
    content, tokens = told.get("content"), told.get("tokens")
    if isinstance(content, list):
        rows = [_row(each) for each in content]
    elif isinstance(tokens, list) and isinstance(told.get("token_logprobs"), list):
        pairs = zip(tokens, told["token_logprobs"], strict=False)
        rows = [_row({"token": token, "logprob": value}) for token, value in pairs]
    else:
        return nothing
    known = [row for row in rows if row is not None]
    if len(known) < len(rows) or len(rows) > TOKENS_MAX:
        return nothing
    return tuple(number for number, _ in known), tuple(value for _, value in known)


def _row(told: object) -> tuple[int, float] | None:
    if not isinstance(told, dict):
        return None
    number, token, value = told.get("id"), told.get("token"), told.get("logprob")
    if isinstance(token, str) and token.startswith(_TOKEN_ID):
        rest = token.removeprefix(_TOKEN_ID)
        number = int(rest) if rest.isdecimal() and len(rest) < 11 else None
    if not _is_count(number) or not number < 2**32:
        return None
    # Not a number, or above 0: no log-prob. Servers round, so that a sure token may be a hair over.
    if not isinstance(value, int | float) or not -1e6 < value <= 1e-3:
        return None
    return number, min(0.0, float(value))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _reason(content: bytes) -> str:
    """The message of an error answer, on one line."""
    try:
        told: Any = json.loads(content)
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict):
        error = told.get("error", told.get("message", ""))
        told = error.get("message", "") if isinstance(error, dict) else error
    text = told if isinstance(told, str) else content.decode(errors="replace")
    line = " ".join(text.split())
    return f": {printable(line, _LINE_CHARS)}" if line else ""
