"""Requests of unlike n, limit, temperature and beginning, and what is recorded of them."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.engines.torch_engine import Generation
from node.engines.vllm.unfinished import Piece
from node.interfaces.engine import Outcome, Recorded, Request, Sampling, plain_requests
from node.policies.policy import Policy
from node.train import frames
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason, version_spans
from tests.unit.test_training_generation import NEW, OLD, PROMPTS, Models
from tests.unit.test_training_generation import models as models
from tests.unit.test_training_generation import qwen as qwen
from tests.unit.training_support import generate, model_text, open_policy, qwen_directory

SAMPLING = Sampling(temperature=0.9, max_new_tokens=8)
ALL = frozenset(("entropies", "runners_up", "hidden"))
SEED = 1
ERROR_MAX = 1e-4


def sampled(
    policy: Policy,
    requests: Sequence[Request],
    steps: int = 100,
    noise: float = 0.0,
    sampling: Sampling = SAMPLING,
) -> list[Outcome]:
    generation = Generation(policy, requests, sampling, SEED, noise)
    while not generation.done:
        generation.advance(steps, OLD)
    return generation.outcomes()


def unlike(policy: Policy) -> list[Request]:
    hello = tuple(policy.encode_completion("hello"))
    return [
        Request(PROMPTS[0], 3),
        Request(PROMPTS[0], 2, temperature=2.0, record=ALL),
        Request(PROMPTS[1], 1, limit=3, record=frozenset({"entropies"})),
        Request(PROMPTS[1], 2, limit=11),
        Request(PROMPTS[2], 2, beginning=hello, record=ALL),
        Request(PROMPTS[2], 2, beginning=hello[:2], temperature=0.5),
        Request(PROMPTS[3], 1, beginning=hello[:1], beginning_logprobs=(-0.25,), seed=9),
        Request(PROMPTS[3], 2, limit=5, beginning=hello, record=ALL),  # the limit is reached
        Request(PROMPTS[3], 1, beginning=(*hello[:2], policy.eos_id), record=ALL),
    ]


class Exact:
    """What a policy says of a completion, by one plain pass in float64."""

    def __init__(self, policy: Policy, request: Request, made: Completion) -> None:
        ids = policy.encode_prompt(request.prompt)
        row = torch.tensor([[*ids, *made.token_ids]])
        with torch.no_grad():
            out = copy.deepcopy(policy.model).double()(row, output_hidden_states=True)
        heat = SAMPLING.temperature if request.temperature is None else request.temperature
        told = (out.logits[0, len(ids) - 1 : -1] / heat).log_softmax(-1)
        self.logprobs = [float(each[at]) for each, at in zip(told, made.token_ids, strict=True)]
        self.entropies = (-told.exp() * told).sum(-1).tolist()
        self.probs = told.exp()
        self.hidden = out.hidden_states[-1][0, -1].tolist()


def error(exact: Exact, recorded: Recorded, places: slice) -> float:
    """The largest difference of what was recorded of these tokens, and of the hidden state."""
    pairs: list[tuple[float, float]] = []
    pairs += zip(recorded.entropies[places], exact.entropies[places], strict=True)
    for (token, first, second), probs in zip(
        recorded.runners_up[places], exact.probs[places], strict=True
    ):
        best = probs.sort(descending=True).values.tolist()
        pairs += [(first, best[0]), (second, best[1]), (float(probs[token]), best[1])]
    if places.stop is None:
        pairs += zip(recorded.hidden, exact.hidden, strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def test_plain_requests_are_what_generate_gives(qwen):
    groups = generate(qwen.policy, PROMPTS, 3, SAMPLING, SEED, OLD)
    plain = plain_requests(PROMPTS, 3)
    assert sampled(qwen.policy, plain) == [Outcome(group) for group in groups]
    recording = [replace(each, record=ALL) for each in plain]
    made = sampled(qwen.policy, recording)
    assert [each.completions for each in made] == groups
    for change in ({"temperature": 1.0}, {"seed": 2}, {"n": 2}, {"limit": 2}):
        others = sampled(qwen.policy, [replace(plain[0], **change), *plain[1:]])
        assert others[0].completions != groups[0]
        assert [[c.token_ids for c in o.completions] for o in others[1:]] == [
            [c.token_ids for c in group] for group in groups[1:]
        ]


@pytest.mark.parametrize("steps", [100, 1])
def test_unlike_requests_in_one_generation_are_each_as_asked(models, steps):
    requests = unlike(models.policy)
    outcomes = sampled(models.policy, requests, steps)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert len(outcome.completions) == request.n
        assert len(outcome.recorded) == (request.n if request.record else 0)
        begun = len(request.beginning)
        for made in outcome.completions:
            limit = SAMPLING.max_new_tokens if request.limit is None else request.limit
            assert made.token_ids[:begun] == request.beginning
            assert made.splices == ((begun,) if begun else ())
            assert made.text == models.policy.decode(made.token_ids)
            ended = made.token_ids[-1] == models.policy.eos_id
            assert made.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert ended or len(made.token_ids) == limit
            exact = Exact(models.policy, request, made)
            given = len(request.beginning_logprobs)
            assert made.logprobs[:given] == request.beginning_logprobs
            assert made.logprobs[given:] == pytest.approx(exact.logprobs[given:], abs=ERROR_MAX)
    assert all(made.token_ids == requests[-1].beginning for made in outcomes[-1].completions)
    assert all(made.token_ids == requests[-2].beginning for made in outcomes[-2].completions)


def test_records_are_those_of_a_plain_pass_in_float64(models):
    requests = unlike(models.policy)
    for request, outcome in zip(requests, sampled(models.policy, requests), strict=True):
        for made, recorded in zip(outcome.completions, outcome.recorded, strict=False):
            count = len(made.token_ids)
            for name, length in (("entropies", count), ("runners_up", count), ("hidden", None)):
                found = len(getattr(recorded, name))
                assert bool(found) == (name in request.record)
                assert length is None or found in (0, length)
            exact = Exact(models.policy, request, made)
            if request.record == ALL:
                assert error(exact, recorded, slice(0, None)) < ERROR_MAX
            else:
                assert recorded.entropies == pytest.approx(exact.entropies, abs=ERROR_MAX)


def test_a_nucleus_has_the_entropy_of_what_is_left(qwen):
    sampling = replace(SAMPLING, top_p=0.5)
    request = Request(PROMPTS[0], 2, record=frozenset({"entropies"}))
    [outcome] = sampled(qwen.policy, [request], sampling=sampling)
    for made, recorded in zip(outcome.completions, outcome.recorded, strict=True):
        for row, found in zip(
            Exact(qwen.policy, request, made).probs.tolist(), recorded.entropies, strict=True
        ):
            kept: list[float] = []
            for share in sorted(row, reverse=True):
                if sum(kept) < sampling.top_p:
                    kept.append(share)
            rest = torch.tensor(kept, dtype=torch.float64) / sum(kept)
            assert found == pytest.approx(float(-(rest * rest.log()).sum()), abs=ERROR_MAX)
    with pytest.raises(ConfigError, match="top_p is 1"):
        sampled(qwen.policy, [Request("1+1=", beginning=(5,))], sampling=sampling)


def mixed(models: Models, *, told: bool) -> list[tuple[Request, Completion, Recorded]]:
    """Sampled in two parts, with other weights from the second on."""
    requests = unlike(models.policy)
    generation = Generation(models.policy, requests, SAMPLING, SEED)
    generation.advance(3, OLD)  # of the requests without a beginning
    models.become(models.new)
    if told:
        generation.weights_changed()
    while not generation.done:
        generation.advance(3, NEW)
    return [
        (request, *pair)
        for request, outcome in zip(requests, generation.outcomes(), strict=True)
        for pair in zip(outcome.completions, outcome.recorded, strict=False)
        if request.record == ALL
    ]


def worst(models: Models, found: list[tuple[Request, Completion, Recorded]]) -> float:
    errors = []
    for request, made, recorded in found:
        spans, at = version_spans(made), 0
        for number, (version, count) in enumerate(spans):
            end = None if number == len(spans) - 1 else at + count
            exact = Exact(models.by_version(version), request, made)
            errors.append(error(exact, recorded, slice(at, end)))
            at += count
    return max(errors)


def test_records_are_of_the_weights_that_made_each_token(models):
    found = mixed(models, told=True)
    assert any(len(version_spans(made)) == 2 for _, made, _ in found)
    assert worst(models, found) < ERROR_MAX


def test_records_of_stale_weights_would_show(qwen):
    assert worst(qwen, mixed(qwen, told=False)) > 10 * ERROR_MAX


def bits(policy: Policy) -> list[bytes]:
    return [each.detach().numpy().tobytes() for each in policy.model.parameters()]


@pytest.mark.parametrize("steps", [100, 2])
def test_noise_is_on_scales_while_it_samples_and_then_gone(models, steps):
    before = bits(models.policy)
    requests = unlike(models.policy)
    outcomes = sampled(models.policy, requests, steps, 0.3)
    assert bits(models.policy) == before
    assert sampled(models.policy, requests, steps, 0.3) == outcomes
    assert sampled(models.policy, requests, steps) != outcomes
    # the definition: normal numbers by the seed, on each scale in the order of modules
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, scale in models.policy.model.named_parameters():
            if ("norm" in name or "ln_" in name) and name.endswith("weight"):
                scale.add_(0.3 * torch.randn(scale.shape, generator=generator))
    assert bits(models.policy) != before
    for request, outcome in zip(requests, outcomes, strict=True):
        for number, made in enumerate(outcome.completions):
            exact = Exact(models.policy, request, made)
            given = len(request.beginning_logprobs)
            assert made.logprobs[given:] == pytest.approx(exact.logprobs[given:], abs=ERROR_MAX)
            if request.record == ALL:
                assert error(exact, outcome.recorded[number], slice(0, None)) < ERROR_MAX


def test_noise_is_gone_after_an_error(qwen):
    before, seen = bits(qwen.policy), []
    generation = Generation(qwen.policy, plain_requests(PROMPTS, 1), SAMPLING, SEED, 0.3)

    def fail(*_: Any) -> None:
        seen.append(bits(qwen.policy) != before)
        raise RuntimeError("out of memory")

    generation._batches[0].advance = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        generation.advance(1, OLD)
    assert seen == [True]
    assert bits(qwen.policy) == before


def test_beginnings_that_the_policy_cannot_have_are_refused(qwen):
    with pytest.raises(ConfigError, match="vocabulary"):
        sampled(qwen.policy, [Request("1+1=", beginning=(100_000,))])


def test_a_beginning_that_does_not_fit_has_no_completions_and_others_have_theirs(qwen):
    requests = [Request("1+1=", beginning=(5,) * 200), Request("1+1=", n=2)]
    found = sampled(qwen.policy, requests)
    assert [len(each.completions) for each in found] == [0, 2]


def test_requests_and_outcomes_travel_to_the_trainers_process(qwen):
    requests = unlike(qwen.policy)
    assert frames.unpack(frames.pack(requests)) == tuple(requests)
    outcomes = sampled(qwen.policy, requests)
    assert frames.unpack(frames.pack(outcomes)) == tuple(outcomes)


@pytest.mark.parametrize(
    ("ids", "limit", "reason"),
    [
        ((5, 6), 8, FinishReason.ABORT),  # goes on
        ((5, 6), 2, FinishReason.LENGTH),
        ((5, None), 8, FinishReason.STOP),
        ((None, 5), 8, FinishReason.LENGTH),
    ],
)
def test_the_vllm_engine_continues_a_beginning_unless_it_has_ended(tmp_path, ids, limit, reason):
    policy = open_policy(qwen_directory(tmp_path))
    text = model_text(tmp_path, policy)
    ids = tuple(policy.eos_id if each is None else each for each in ids)
    request = Request("1+1=", beginning=ids)
    told = replace(request, beginning_logprobs=(-0.5, -0.25))
    assert text.beginning(Request("1+1="), Sampling(), limit) is None
    assert text.beginning(request, Sampling(), limit) == Piece(ids, (), reason)
    assert text.beginning(told, SAMPLING, limit) == Piece(ids, (-0.5, -0.25), reason)
    with pytest.raises(ConfigError, match="at temperature 1 and top_p 1 alone"):
        text.beginning(request, SAMPLING, limit)
