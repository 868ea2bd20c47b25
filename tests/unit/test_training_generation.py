"""A generation in segments, and weights that are replaced between two of them."""

from pathlib import Path

import pytest
import torch

from node.engines import torch_engine
from node.engines.torch_engine import Generation
from node.interfaces.engine import Sampling, plain_requests
from node.policies.policy import Policy
from swarm.rollouts import Completion, version_spans
from tests.unit.training_support import (
    generate,
    gpt2_directory,
    mamba_directory,
    open_policy,
    qwen_directory,
    reference_logprobs,
)

LONG = "what all of these prompts have in common, which is worth a pass of its own: "
PROMPTS = ("1+1=", "a longer prompt than the first", LONG + "?", LONG + "??")
SAMPLING = Sampling(temperature=0.9, max_new_tokens=12)
EACH, SEED, OLD, NEW = 3, 1, 7, 9
LOGPROB_ERROR_MAX = 1e-4

Groups = list[tuple[Completion, ...]]


class Models:
    """A policy to sample with, and the old and the new one that it is to be."""

    def __init__(self, directory: Path) -> None:
        self.policy, self.old, self.new = (open_policy(directory) for _ in range(3))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.new.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.3 * parameter.std().nan_to_num(0.1) * noise)

    def become(self, other: Policy) -> None:
        self.policy.model.load_state_dict(other.model.state_dict())

    def begin(self) -> Generation:
        return Generation(self.policy, plain_requests(PROMPTS, EACH), SAMPLING, SEED)

    def by_version(self, version: int) -> Policy:
        return {OLD: self.old, NEW: self.new}[version]


@pytest.fixture(params=[qwen_directory, gpt2_directory, mamba_directory])
def models(request, tmp_path) -> Models:
    return Models(request.param(tmp_path))


@pytest.fixture
def qwen(tmp_path) -> Models:
    return Models(qwen_directory(tmp_path))


def run_on(generation: Generation, steps: int, version: int) -> Groups:
    while not generation.done:
        generation.advance(steps, version)
    return generation.completions()


def columns(groups: Groups) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in groups for completion in group]


def mismatch(models: Models, groups: Groups) -> float:
    """The largest difference between a log-prob and its token's under the weights of its span."""
    worst = 0.0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            begin = 0
            for version, count in version_spans(completion):
                policy = models.by_version(version)
                expected = reference_logprobs(policy, prompt, completion, SAMPLING)
                pairs = zip(completion.logprobs, expected, strict=True)
                here = list(pairs)[begin : begin + count]
                worst = max(worst, *(abs(ours - theirs) for ours, theirs in here))
                begin += count
    return worst


@pytest.mark.parametrize("steps", [1, 5])
def test_segments_change_no_bit(models, steps):
    whole = generate(models.policy, PROMPTS, EACH, SAMPLING, SEED, OLD)
    assert run_on(models.begin(), steps, OLD) == whole
    assert all(c.spans == () and c.policy_version == OLD for group in whole for c in group)
    other_seed = Generation(models.policy, plain_requests(PROMPTS, EACH), SAMPLING, SEED + 1)
    assert run_on(other_seed, steps, OLD) != whole


def test_the_same_weights_again_change_nothing_but_rounding(models):
    whole = generate(models.policy, PROMPTS, EACH, SAMPLING, SEED, OLD)
    generation = models.begin()
    while not generation.done:
        generation.advance(5, OLD)
        generation.weights_changed()
    groups = generation.completions()
    assert columns(groups) == columns(whole)
    assert not any(completion.spans for group in groups for completion in group)
    assert mismatch(models, groups) < LOGPROB_ERROR_MAX


@pytest.mark.parametrize("catch_up_tokens_max", [torch_engine.CATCH_UP_TOKENS_MAX, 30])
def test_tokens_after_a_load_are_those_of_the_new_weights(models, monkeypatch, catch_up_tokens_max):
    monkeypatch.setattr(torch_engine, "CATCH_UP_TOKENS_MAX", catch_up_tokens_max)
    monkeypatch.setattr(torch_engine, "ROWS_MAX", 5)  # a batch is done, one begun, one to come
    old = generate(models.old, PROMPTS, EACH, SAMPLING, SEED, OLD)
    new = generate(models.new, PROMPTS, EACH, SAMPLING, SEED, NEW)
    assert columns(old) != columns(new)
    generation = models.begin()
    before = SAMPLING.max_new_tokens + 5
    generation.advance(before, OLD)
    models.become(models.new)
    generation.weights_changed()
    groups = run_on(generation, 4, NEW)

    mixed = 0
    for ours, by_old, by_new in zip(
        *([c for group in each for c in group] for each in (groups, old, new)), strict=True
    ):
        spans = version_spans(ours)
        if len(spans) == 2:
            mixed += 1
            (first, count), (second, _) = spans
            assert (first, second, ours.policy_version) == (OLD, NEW, OLD)
            assert ours.token_ids[:count] == by_old.token_ids[:count]
            assert ours.logprobs[:count] == pytest.approx(by_old.logprobs[:count], abs=1e-4)
        else:
            whole = by_old if ours.policy_version == OLD else by_new
            assert (ours.token_ids, ours.policy_version) == (whole.token_ids, whole.policy_version)
    assert mixed
    assert {c.policy_version for group in groups for c in group if not c.spans} == {OLD, NEW}
    assert mismatch(models, groups) < LOGPROB_ERROR_MAX


def test_keys_and_values_of_the_old_weights_would_show(qwen):
    """That the test above can fail: here nobody tells the generation of the new weights."""
    generation = qwen.begin()
    generation.advance(5, OLD)
    qwen.become(qwen.new)
    assert mismatch(qwen, run_on(generation, 4, NEW)) > 0.01


def test_one_version_for_another_would_show(qwen):
    generation = qwen.begin()
    generation.advance(5, OLD)
    qwen.become(qwen.new)
    generation.weights_changed()
    groups = run_on(generation, 4, NEW)
    qwen.old, qwen.new = qwen.new, qwen.old
    assert mismatch(qwen, groups) > 0.01


def test_weights_of_an_older_version_begin_anew(qwen):
    expected = generate(qwen.new, PROMPTS, EACH, SAMPLING, SEED, OLD)
    generation = qwen.begin()
    generation.advance(5, NEW)
    qwen.become(qwen.new)
    generation.weights_changed()
    assert run_on(generation, 4, OLD) == expected


def test_several_loads_leave_as_many_runs(qwen):
    generation = qwen.begin()
    versions = [OLD, OLD, OLD + 1, OLD + 4]
    for version in versions:
        generation.advance(2, version)
        generation.weights_changed()
    groups = run_on(generation, 4, versions[-1])
    longest = max((c for group in groups for c in group), key=lambda c: len(c.token_ids))
    assert version_spans(longest) == ((OLD, 4), (OLD + 1, 2), (OLD + 4, 6))


def test_prompts_share_no_random_numbers_for_32_bits_of_a_seed():
    """Of these two prompts' seeds the last 32 bits agree, all that torch takes on a CPU."""
    requests = plain_requests(("3457", "42764"), 2)
    found = torch_engine.uniforms_of(requests, 8, 0)
    assert not any(torch.equal(found[0], each) for each in found[1:])
    assert all(map(torch.equal, found, torch_engine.uniforms_of(requests, 8, 0)))
    assert not any(map(torch.equal, found, torch_engine.uniforms_of(requests, 8, 1)))
