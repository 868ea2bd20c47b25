"""A served model: what is asked, what is believed of the answer, and waiting for a server."""

import gzip
import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from node.commands import doctor
from node.commands.doctor import check_model, check_server, check_software
from node.config import NodeConfig, load_config
from node.engines import openai_engine
from node.engines import openai_server as server
from node.engines.openai_engine import ServedModel, open_served_model
from node.engines.openai_server import ChatAsks
from node.hosting.models import resolved_model, served_model
from node.interfaces.engine import EngineInfo, Outcome, Request, Sampling, plain_requests
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import PolicyInfo
from swarm.errors import ChildFailed, ConfigError
from swarm.limits.backoff import Backoff
from swarm.rollouts import Completion, FinishReason
from tests.openai_server import (
    Answer,
    Handler,
    OpenAiTestServer,
    answer_sums,
    no_such_server,
    openai_server,
)
from tests.support import run

WHOLE = Sampling(max_new_tokens=8)
COOL = Sampling(temperature=0.6, max_new_tokens=8)


@pytest.fixture
def served() -> Iterator[OpenAiTestServer]:
    with openai_server() as found:
        yield found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits as long as a node."""
    monkeypatch.setattr(openai_engine, "RETRY", Backoff(0.01, 0.01))


def generated(
    url: str, asked: list[str], each: int = 1, sampling: Sampling = WHOLE, **options: Any
) -> list[tuple[Completion, ...]]:
    async def body() -> list[tuple[Completion, ...]]:
        async with open_served_model(url, None, None, **options) as model:
            return await model.generate(asked, each, sampling, 7)

    found: list[tuple[Completion, ...]] = run(body)
    return found


def completions(found: OpenAiTestServer) -> list[dict[str, Any]]:
    """What completions were asked for, but for the trial."""
    return [asked for path, _, asked in found.seen if "completions" in path][1:]


# --- what is asked ---------------------------------------------------------------------------


def test_each_prompt_gets_its_completions_in_order_each_by_a_seed_of_its_own(served):
    groups = generated(served.url, ["1+2=", "30+4="], 8)
    assert [len(group) for group in groups] == [8, 8]
    assert {c.text for c in groups[0]} == {"3", "4"}
    assert {c.text for c in groups[1]} == {"34", "35"}
    seeds = [asked["seed"] for asked in completions(served)]
    assert len(set(seeds)) == 16
    assert generated(served.url, ["1+2=", "30+4="], 8) == groups


def test_a_chat_gets_messages_and_plain_text_a_prompt(served):
    prompt = Prompt.of("1+2=", "Give the answer.", [("3+3=", "6")]).text
    generated(served.url, [prompt])
    assert [m["role"] for m in completions(served)[0]["messages"]] == [
        *("system", "user", "assistant", "user")
    ]
    served.seen.clear()
    generated(served.url, [prompt], prompts="text")
    path, _, asked = served.seen[-1]
    assert path == "/v1/completions"
    assert asked["prompt"].endswith("1+2=\n")
    assert "messages" not in asked


def test_what_a_server_does_unasked_is_turned_off_where_it_says_which_it_is(served):
    generated(served.url, ["1+2="])
    assert not {"top_k", "min_p"} & completions(served)[0].keys()  # others refuse what they lack
    for kind, off in (("vllm", -1), ("llamacpp", 0), ("sglang", -1)):
        served.seen.clear()
        served.models = [{"id": "sums", "owned_by": kind}]
        generated(served.url, ["1+2="])
        asked = completions(served)[0]
        assert (asked["top_k"], asked["min_p"], asked["max_tokens"]) == (off, 0.0, 8)


def sampled(url: str, requests: list[Request], noise: float = 0.0) -> list[Outcome]:
    async def body() -> list[Outcome]:
        async with open_served_model(url, None, None) as model:
            return await model.sample(requests, WHOLE, 7, noise)

    found: list[Outcome] = run(body)
    return found


def test_requests_have_limits_and_temperatures_of_their_own(served):
    wanted = [
        Request("1+2=", 3, temperature=0.5),
        Request("30+4=", 2, limit=4),
        Request("1+2=", 2),
        Request("1+2=", 2, seed=7),
        Request("1+2=", 1),
    ]
    outcomes = sampled(served.url, wanted)
    assert [len(each.completions) for each in outcomes] == [3, 2, 2, 2, 1]
    asked = completions(served)
    told = sorted((each["temperature"], each["max_tokens"]) for each in asked)
    assert told == [(0.5, 8)] * 3 + [(1.0, 4)] * 2 + [(1.0, 8)] * 5
    # a seed of its own that is the call's is no other request; else nothing is drawn twice
    assert len({each["seed"] for each in asked}) == len(asked)
    plain = generated(served.url, ["1+2=", "30+4="], 2)
    assert sampled(served.url, plain_requests(["1+2=", "30+4="], 2)) == list(map(Outcome, plain))


@pytest.mark.parametrize(
    ("request_", "noise", "named"),
    [
        (Request("1+2=", beginning=(5,)), 0.0, "the engine openai continues no beginnings"),
        (Request("1+2=", record=frozenset({"hidden"})), 0.0, "the engine openai records no hidden"),
        (Request("1+2="), 0.1, "the engine openai adds no noise"),
        (Request("1+2=", limit=0), 0.0, "max_new_tokens >= 1"),
        (Request("1+2=", n=0), 0.0, "take at least 1"),
        (Request("1+2="), -0.1, "noise = -0.1"),
        (Request("1+2=", beginning=(5,), beginning_logprobs=(-1.0, -1.0)), 0.0, "another number"),
    ],
)
def test_what_no_server_does_is_refused_by_name_before_it_is_asked(served, request_, noise, named):
    with pytest.raises(ConfigError, match=named):
        sampled(served.url, [request_], noise)
    assert not completions(served)


def test_no_more_requests_are_under_way_than_the_settings_say(served):
    at_once, most = [0], [0]

    def slow(handler: Handler) -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        trio.run(trio.sleep, 0.02)
        at_once[0] -= 1
        handler.say("3")

    served.answer = slow
    generated(served.url, ["1+2="], 12, requests_max=3)
    assert 2 <= most[0] <= 3


# --- what is believed of the answer ----------------------------------------------------------


def told(*rows: dict[str, Any]) -> Any:
    return lambda handler: handler.say("3", logprobs={"content": list(rows)})


def test_log_probs_go_along_where_they_are_of_what_was_sampled_and_the_tokenizer_is_known(served):
    served.models = [{"id": "sums", "owned_by": "llamacpp"}]
    served.answer = told({"token": "3", "id": 5, "logprob": -0.5}, {"id": 2, "logprob": 0.0001})
    [[said]] = generated(served.url, ["1+2="], tokenizer="ab" * 32)
    assert completions(served)[0]["logprobs"] is True
    assert (said.token_ids, said.logprobs) == ((5, 2), (-0.5, 0.0))
    [[unknown]] = generated(served.url, ["1+2="])
    assert (unknown.token_ids, unknown.logprobs) == ((), ())
    served.seen.clear()
    generated(served.url, ["1+2="], sampling=COOL, tokenizer="ab" * 32)
    assert "logprobs" not in completions(served)[0]  # they would be of temperature 1


def test_vllm_spells_out_the_numbers_of_tokens(served):
    served.models = [{"id": "sums", "owned_by": "vllm"}]
    served.answer = told({"token": "token_id:17", "logprob": -1.25})
    [[said]] = generated(served.url, ["1+2="], tokenizer="t")
    assert completions(served)[0]["return_tokens_as_token_ids"] is True
    assert (said.token_ids, said.logprobs) == ((17,), (-1.25,))
    columns = {"tokens": ["token_id:1", "token_id:2"], "token_logprobs": [-0.5, -0.25]}
    served.answer = lambda handler: handler.say("3", logprobs=columns)
    [[said]] = generated(served.url, ["1+2="], prompts="text", tokenizer="t")
    assert (said.token_ids, said.logprobs) == ((1, 2), (-0.5, -0.25))


@pytest.mark.parametrize(
    "row",
    [
        {"token": "3", "logprob": -0.5},
        {"id": 3},
        {"id": -1, "logprob": -0.5},
        {"id": True, "logprob": -0.5},
        {"id": 2**32, "logprob": -0.5},
        {"id": 3, "logprob": 0.5},
        {"id": 3, "logprob": float("nan")},
        {"id": 3, "logprob": float("-inf")},
        {"token": "token_id:x", "logprob": -0.5},
        {"token": "token_id:" + "9" * 5000, "logprob": -0.5},
        "three",
    ],
)
def test_columns_with_a_hole_are_none(served, row):
    served.models = [{"id": "sums", "owned_by": "llamacpp"}]
    served.answer = told({"id": 5, "logprob": -0.5}, row)
    [[said]] = generated(served.url, ["1+2="], tokenizer="t")
    assert (said.text, said.token_ids, said.logprobs) == ("3", (), ())


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("tool_calls", FinishReason.LENGTH),
        (None, FinishReason.LENGTH),
    ],
)
def test_only_what_ended_by_itself_has_ended(served, reason, found):
    served.answer = lambda handler: handler.say("3", reason)
    [[said]] = generated(served.url, ["1+2="])
    assert said.finish_reason is found


def test_half_a_character_is_text_that_can_be_sent(served):
    served.answer = lambda handler: handler.raw(
        b'{"choices": [{"message": {"content": "3\\ud800"}, "finish_reason": "stop"}]}'
    )
    [[said]] = generated(served.url, ["1+2="])
    assert said.text == "3?"


def test_a_server_whose_model_has_half_a_character_in_its_name_is_asked(served):
    served.models = [{"id": "sums\ud800"}]
    assert generated(served.url, ["1+2="])[0][0].text in {"3", "4"}
    assert {asked["model"] for asked in completions(served)} == {"sums?"}


def test_a_count_of_tokens_beyond_any_completion_is_not_believed():
    told = {"choices": [{"message": {"content": "3"}}], "usage": {"completion_tokens": 10**30}}
    assert server._read(told)[0].tokens == 0


def message(reason: str, **told: Any) -> Answer:
    """A server's answer by the parts of its message."""
    return lambda handler: handler.reply(
        {"choices": [{"message": {"role": "assistant", **told}, "finish_reason": reason}]}
    )


EMPTY = {
    "empty": message("length", content=None),
    "blank": message("stop", content=""),
    "calls tools": message("tool_calls", content=None, tool_calls=[{"id": "1"}]),
    "[thinking]": message("length", content=None, reasoning_content="hm"),
    "table": message("stop", content="3", reasoning="hm"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_what_is_no_answer_is_told_and_never_shared(served, name):
    served.answer = EMPTY[name]
    said = "empty" if name == "blank" else name
    with pytest.raises(ConfigError, match=re.escape(said)):  # so says `doctor`
        generated(served.url, ["1+2="])
    served.faults = [answer_sums]  # the trial goes well
    with pytest.raises(ConfigError, match=re.escape(said)):
        generated(served.url, ["1+2="])


def test_one_empty_answer_is_asked_for_again(served):
    served.faults = [answer_sums, EMPTY["empty"], EMPTY["blank"]]
    [[said]] = generated(served.url, ["1+2="])
    assert said.text in ("3", "4")
    seeds = [asked["seed"] for asked in completions(served)]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (message("stop", content="3", reasoning_content="hm\n"), "hm\n</think>3"),
        (message("length", content=None, reasoning="hm"), "hm"),
        (message("stop", content="", reasoning="hm"), "hm</think>"),
        (message("stop", content="hm</think>3"), "hm</think>3"),
    ],
)
def test_a_thought_that_is_told_apart_comes_before_the_answer(served, answer, text):
    served.answer = answer
    asks = ChatAsks('{"enable_thinking":true}', "</think>")
    [[said]] = generated(served.url, ["1+2="], asks=asks)
    assert (said.text, said.token_ids) == (text, ())
    asked = completions(served)[0]
    assert asked["chat_template_kwargs"] == {"enable_thinking": True}


FAULTS = {
    "status 500": lambda handler: handler.raw(b"oh", 500),
    "status 503": lambda handler: handler.reply({"error": "loading"}, 503),
    "status 429": lambda handler: handler.reply({"error": {"message": "slow down"}}, 429),
    "no JSON object": lambda handler: handler.raw(b"[" * 100_000),
    "no JSON": lambda handler: handler.raw(b"<html>"),
    "no choices": lambda handler: handler.reply({"choices": []}),
    "no text": lambda handler: handler.say(["3"]),
    "over 8 MiB": lambda handler: handler.raw(b" " * (8 * 2**20 + 1)),
    "packs its answers": lambda handler: handler.raw(
        gzip.compress(json.dumps({"choices": []}).encode()), content_encoding="gzip"
    ),
    "disconnected": lambda handler: handler.connection.shutdown(socket.SHUT_RDWR),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_answer_that_is_none_is_told_once_and_asked_for_again(served, name):
    heard: list[str] = []

    async def body() -> list[tuple[Completion, ...]]:
        async with open_served_model(served.url, None, None) as model:
            served.faults = [FAULTS[name]] * 3

            async def tell(text: str) -> None:
                heard.append(text)

            model.tell = tell
            return await model.generate(["1+2="], 1, WHOLE, 7)

    [[said]] = run(body)
    assert said.text in ("3", "4")
    assert served.faults == []
    assert len(heard) == 1
    if name != "disconnected":  # httpx has several words for that
        assert name.split()[-1] in heard[0]
    assert served.url in heard[0]
    assert heard[0].endswith("the node tries until it answers")


def test_an_answer_that_drips_is_given_up(served, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.3)
    stop = False

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while not stop:
            handler.wfile.write(b" ")
            trio.run(trio.sleep, 0.02)

    async def body() -> None:
        nonlocal stop
        async with open_served_model(served.url, None, None) as model:
            served.faults = [drip]
            [[said]] = await model.generate(["1+2="], 1, WHOLE, 7)
            stop = True
            assert said.text in ("3", "4")

    run(body)


def test_a_request_that_is_refused_ends_it_with_the_servers_words(served):
    words = {"error": {"message": "no\n chat  template"}}
    served.answer = lambda handler: handler.reply(words, 400)
    with pytest.raises(ConfigError, match=r"status 400: no chat template$"):
        generated(served.url, ["1+2="])

    async def later() -> None:
        async with open_served_model(served.url, None, None) as model:
            served.answer = lambda handler: handler.reply({"message": "too long"}, 422)
            await model.generate(["1+2=", "3+4="], 4, WHOLE, 7)

    served.answer = lambda handler: handler.say("3")
    with pytest.raises(ConfigError, match="status 422: too long"):
        run(later)


def test_a_server_that_goes_is_waited_for_until_the_node_leaves(served):
    async def body() -> None:
        async with open_served_model(served.url, None, None) as model:
            served.answer = lambda handler: handler.raw(b"", 503)
            with trio.move_on_after(0.3) as scope:
                await model.generate(["1+2="], 2, WHOLE, 7)
            assert scope.cancelled_caught

    run(body)


# --- at the start ----------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_said_in_one_line():
    url = no_such_server()
    with pytest.raises(ConfigError, match=r"^--engine-url http.*; is the server running\?$"):
        generated(url, ["1+2="])


def test_of_several_models_one_has_to_be_named(served):
    served.models = [{"id": "sums"}, {"id": "words"}, {"no": "id"}]
    with pytest.raises(ConfigError, match="it serves sums, words: name one with --model"):
        generated(served.url, ["1+2="])

    async def named(model: str) -> str:
        async with open_served_model(served.url, model, None) as found:
            return (await found.info()).name

    assert run(named, "words") == "words"
    with pytest.raises(ConfigError, match=r"^--model wards: http.* serves sums, words$"):
        run(named, "wards")


def test_the_key_is_sent_and_a_wrong_one_is_said(served, monkeypatch):
    served.key = "secret"
    with pytest.raises(ConfigError, match=r"status 401: no such key; name the variable"):
        generated(served.url, ["1+2="])

    async def body() -> None:
        async with served_model(config_of(served.url, engine_key_env="A_KEY")):
            pass

    with pytest.raises(ConfigError, match="A_KEY: that variable is not set"):
        run(body)
    monkeypatch.setenv("A_KEY", "secret")
    run(body)


def test_what_llama_cpp_says_of_a_file_goes_along_but_not_where_it_lies(served):
    name = "/srv/models/models/smol.Q4_1.gguf"
    served.models = [{"id": name, "owned_by": "llamacpp", "meta": {"ftype": "Q4_1"}}]

    async def body() -> tuple[PolicyInfo, EngineInfo]:
        async with open_served_model(served.url, None, None) as model:
            return await model.info(), model.maker

    info, maker = run(body)
    assert (info.name, info.tokenizer) == ("smol.Q4_1.gguf", "served:smol.Q4_1.gguf")
    assert (maker.engine, maker.precision) == ("openai", "q4_1")
    assert completions(served) == []
    assert served.seen[-1][2]["model"] == name
    served.models[0]["meta"] = {"ftype": "F16"}
    assert run(body)[1].precision == "float16"


# --- the settings ----------------------------------------------------------------------------


def config_of(url: str | None, **more: Any) -> NodeConfig:
    return load_config({"engine": "openai", "engine_url": url, **more}, {})


def test_a_node_with_a_served_model_draws_evaluates_and_makes_nothing():
    config = config_of("http://127.0.0.1:8080/v1/")  # the run file has other numbers for all nodes
    assert config.engine_url == "http://127.0.0.1:8080/v1"
    assert (config.external_groups, config.evaluate_every_rounds, config.validated_by) == (0, 0, 0)
    assert resolved_model(config) == ("tiny", False)
    assert load_config({}, {}).external_groups > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"engine_url": None}, "--engine openai: needs the address"),
        ({"engine_url": "127.0.0.1:8080"}, "must look like http://127.0.0.1:8080/v1"),
        ({"engine_url": "http://me:key@host/v1"}, "must hold no key"),
        ({"engine": "torch", "engine_url": "http://h/v1"}, "try --engine openai"),
        ({"local_groups": 0}, "nothing to share"),
        ({"generate": "hints"}, "generate hints"),
        ({"over_provision": 2.0}, "over-provision"),
        ({"replay": "rescue"}, "rescue"),
        ({"engine_quantization": "fp8"}, "needs the engine vllm"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        load_config({"engine": "openai", "engine_url": "http://h/v1", **flags}, {})


def test_doctor_says_what_is_served_or_what_is_wrong(served, monkeypatch):
    served.models[0]["meta"] = {"ftype": "Q4_1"}
    found = run(partial(check_server, config_of(served.url)))
    assert found.line() == f"  ok  server: {served.url} serves sums in q4_1, texts alone"
    url = no_such_server()
    found = run(partial(check_server, config_of(url)))
    assert (found.level, found.text[:13]) == ("fail", "--engine-url ")
    # Such a node needs no torch, and no memory for a model
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert check_software(config_of(url)).level == "ok"
    assert check_software(load_config({}, {})).level == "fail"
    assert check_model(config_of(url), None).level == "ok"


# --- as a trainer ----------------------------------------------------------------------------


def test_it_counts_what_the_server_says_it_sampled_and_trains_nothing(served, tmp_path):
    async def body() -> None:
        async with open_served_model(served.url, None, None) as model:
            assert model.capabilities.counts
            await model.generate(["1+2=", "3+4="], 2, WHOLE, 7)
            assert (model.take_sampled(), model.take_sampled()) == (12, 0)
            report = await model.train([])
            assert (report.policy_version, report.trained_tokens) == (0, 0)
            info = await model.info()
            assert (info.name, info.tokenizer, info.parameters) == ("sums", "served:sums", 0)
            await refuses_weights(model, tmp_path)

    run(body)


async def refuses_weights(model: ServedModel, directory: Path) -> None:
    for take in (
        lambda: model.load(directory, 1),
        lambda: model.roll_back(directory),
        lambda: model.export(directory),
        lambda: model.export_whole(directory),
    ):
        with pytest.raises(ChildFailed, match="weights"):
            await take()
