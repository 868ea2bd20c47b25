"""What the torch engine promises beyond the contract of all engines."""

from dataclasses import replace

import pytest
import torch

from node.engines import torch_engine
from node.engines.torch_engine import distribution, pick_tokens
from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from swarm.rollouts import FinishReason
from tests.unit.training_support import (
    generate,
    gpt2_directory,
    mamba_directory,
    open_policy,
    qwen_directory,
    reference_logprobs,
)

LONG = "what all of these prompts have in common, which is worth a pass of its own: "
PROMPTS = ("1+1=", "a longer prompt than the first", *(LONG + "?" * k for k in range(5)))
SAMPLING = Sampling(max_new_tokens=6)


@pytest.fixture(params=[qwen_directory, gpt2_directory, mamba_directory])
def policy(request, tmp_path):
    return open_policy(request.param(tmp_path))


@pytest.fixture
def qwen(tmp_path):
    return open_policy(qwen_directory(tmp_path))


@pytest.mark.parametrize(
    "sampling", [SAMPLING, replace(SAMPLING, temperature=0.7, top_p=0.8)], ids=["plain", "nucleus"]
)
def test_log_probs_are_of_the_distribution_sampled_from(policy, sampling):
    groups = generate(policy, PROMPTS, 3, sampling, 1, 0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = reference_logprobs(policy, prompt, completion, sampling)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_rest_of_the_batch_does_not_matter(policy):
    together = generate(policy, PROMPTS, 3, SAMPLING, 1, 0)
    for prompt, group in zip(PROMPTS, together, strict=True):
        [alone] = generate(policy, [prompt], 3, SAMPLING, 1, 0)
        for one, other in zip(alone, group, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("limit", "value"), [("ROWS_MAX", 2), ("LOGITS_MAX", 1200), ("CACHE_BYTES_MAX", 100_000)]
)
def test_the_split_of_a_big_batch_does_not_matter(policy, monkeypatch, limit, value):
    together = generate(policy, PROMPTS, 3, SAMPLING, 1, 0)
    monkeypatch.setattr(torch_engine, limit, value)
    sizes = []
    batches = torch_engine.batches_of

    def counted(*arguments):
        for rows in batches(*arguments):
            sizes.append(len(rows))
            yield rows

    monkeypatch.setattr(torch_engine, "batches_of", counted)
    split = generate(policy, PROMPTS, 3, SAMPLING, 1, 0)
    assert sum(sizes) == 3 * len(PROMPTS)
    assert limit == "CACHE_BYTES_MAX" or max(sizes) <= 4
    assert len(sizes) > 2
    for one, other in zip(together, split, strict=True):
        for left, right in zip(one, other, strict=True):
            assert left.token_ids == right.token_ids
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)


@pytest.mark.parametrize("make", [gpt2_directory, mamba_directory])
def test_logits_are_computed_where_they_are_needed_alone(make, tmp_path):
    """Of a big vocabulary, those of all prompt positions would be most of the memory."""
    policy = open_policy(make(tmp_path))
    positions = []
    policy.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: positions.append(output.shape[:-1].numel())
    )
    groups = generate(policy, ["a long prompt " * 5, "short"], 2, SAMPLING, 1, 0)
    assert max(positions) <= 4  # one of each completion
    positions.clear()
    long = TrainingGroup("a long prompt " * 5, groups[0], (1.0, -1.0), own_tokens=True)
    GroupTrainer(policy, TrainerSpec("test"), 10_000).train([long])
    assert max(positions) == sum(len(c.token_ids) for c in groups[0])


def test_prompts_of_one_token_are_sampled_from(tmp_path):
    policy = open_policy(gpt2_directory(tmp_path))
    policy.tokenizer.backend_tokenizer.post_processor = None
    prompts = ["a", "b", "two"]
    assert [len(policy.encode_prompt(prompt)) for prompt in prompts] == [1, 1, 3]
    for chosen in (prompts[:2], prompts):
        groups = generate(policy, chosen, 2, SAMPLING, 1, 0)
        for prompt, group in zip(chosen, groups, strict=True):
            for completion in group:
                expected = reference_logprobs(policy, prompt, completion, SAMPLING)
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_trainer_sees_the_log_probs_of_the_engine(policy):
    groups = generate(policy, PROMPTS, 2, SAMPLING, 1, 0)
    batch = [
        TrainingGroup(prompt, group, (1.0, -1.0), own_tokens=True)
        for prompt, group in zip(PROMPTS, groups, strict=True)
    ]
    seen = GroupTrainer(policy, TrainerSpec("test"), 10_000).logprobs(batch)
    for group, rows in zip(groups, seen, strict=True):
        for completion, row in zip(group, rows, strict=True):
            assert row == pytest.approx(completion.logprobs, abs=1e-4)


def test_the_end_of_sequence_token_stops_and_is_kept(qwen):
    groups = generate(qwen, ["1+1="], 64, replace(SAMPLING, temperature=3.0), 1, 0)
    stopped = [c for c in groups[0] if c.finish_reason is FinishReason.STOP]
    assert stopped
    for completion in groups[0]:
        ended = completion.token_ids[-1] == qwen.eos_id
        assert ended == (completion.finish_reason is FinishReason.STOP)
        assert qwen.eos_id not in completion.token_ids[:-1]
        assert "<eos>" not in completion.text


def test_the_context_bounds_completions_and_prompts(qwen):
    prompt = "x" * (qwen.context_tokens - 2 - 5)
    [group] = generate(qwen, [prompt], 4, replace(SAMPLING, max_new_tokens=50), 1, 0)
    assert max(len(c.token_ids) for c in group) == 5
    alone = generate(qwen, ["1+1=", "2+2="], 4, SAMPLING, 1, 0)
    long = "x" * qwen.context_tokens
    beside = generate(qwen, ["1+1=", long, "2+2="], 4, SAMPLING, 1, 0)
    assert beside == [alone[0], (), alone[1]]  # and it changes no other's random numbers


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_p": 0.0}, {"max_new_tokens": 0}])
def test_senseless_sampling_is_refused(qwen, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        generate(qwen, ["1+1="], 1, replace(SAMPLING, **wrong), 1, 0)


def test_tokens_are_drawn_in_proportion():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    uniforms = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    tokens, logprobs = pick_tokens(distribution(probs.log().expand(1000, -1), 1.0, 1.0), uniforms)
    counts = torch.bincount(tokens, minlength=4).tolist()
    assert counts == pytest.approx([500, 0, 300, 200], abs=1)
    assert torch.allclose(logprobs.exp().float(), probs[tokens], atol=1e-6)


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    probs = torch.tensor([0.2, 0.5, 0.3])
    uniforms = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    tokens, logprobs = pick_tokens(distribution(probs.log().expand(1000, -1), 1.0, 0.6), uniforms)
    assert torch.bincount(tokens, minlength=3).tolist() == pytest.approx([0, 625, 375], abs=1)
    assert float(logprobs[tokens == 1][0].exp()) == pytest.approx(0.625)


def test_a_row_that_ends_at_the_context_may_stand_beside_others_that_go_on(tmp_path):
    """A model with learned positions has none beyond its context to look up."""
    policy = open_policy(gpt2_directory(tmp_path))
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=60)
    short = [letter * 8 for letter in "abcdefghijklmnop"]
    long = "z" * (policy.context_tokens - 20)
    *groups, (last,) = generate(policy, [*short, long], 1, sampling, 3, 0)
    assert len(last.token_ids) <= 20
    assert max(len(made.token_ids) for (made,) in groups) > 30
    (alone,) = generate(policy, [long], 1, sampling, 3, 0)
    assert last.token_ids == alone[0].token_ids
