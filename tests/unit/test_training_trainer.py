import math
from dataclasses import replace

import pytest
import torch

from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup, training_group
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.choices import ADVANTAGES, advantages
from node.methods.losses import OBJECTIVES
from node.policies import lean
from node.policies.policy import Policy
from node.train import trainer as trainer_module
from node.train.rows import Encoder
from node.train.trainer import GroupTrainer
from swarm.rollouts import FinishReason
from tests.scored_groups import of_completions
from tests.unit.training_support import (
    generate,
    gpt2_directory,
    group,
    mamba_directory,
    open_policy,
    qwen_directory,
    step_of,
)

SPEC = TrainerSpec("test", grad_norm_max=1e9, step_guard=False, foreign_weighting="none")
MANY = 100_000  # tokens: one micro-batch
LONG = "what all of these prompts have in common, which is worth a pass of its own: "


@pytest.fixture(params=[qwen_directory, gpt2_directory, mamba_directory])
def policy(request, tmp_path) -> Policy:
    """One model for each way through the forward pass: lean, shared, plain."""
    return open_policy(request.param(tmp_path))


@pytest.fixture
def qwen(tmp_path) -> Policy:
    return open_policy(qwen_directory(tmp_path))


def ragged(policy: Policy) -> list[TrainingGroup]:
    """Groups of 2, 4 and 8, own and foreign, prompts of different lengths."""
    eight = [str(7 * k) + "x" * (k % 3) for k in range(8)]
    return [
        group(policy, "1+1=", ["2", "13"], [1.0, -1.0]),
        group(policy, "say something longer:", ["a", "bb", "ccc", ""], [0.5, -1.5, 0.7, 0.3]),
        group(policy, "12/16=", eight, [1.0, -1.0] * 4, own=False),
    ]


def alike(policy: Policy) -> list[TrainingGroup]:
    """Prompts with a long common beginning."""
    return [
        group(policy, LONG + "?" * k, ["yes", "n", "maybe"], [1.0, -0.4, -0.6]) for k in range(1, 6)
    ]


def update(policy: Policy, groups, spec=SPEC, micro_batch_tokens=MANY):
    return step_of(policy, groups, spec, micro_batch_tokens)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def reference(policy: Policy, groups) -> tuple[float, torch.Tensor]:
    """Loss and gradient from the definition: one unpadded sequence at a time."""
    parameters = list(policy.model.parameters())
    total = sum(len(c.token_ids) for g in groups for c in g.completions)
    loss = torch.zeros(())
    for one in groups:
        prompt = policy.encode_prompt(one.prompt)
        for completion, advantage in zip(one.completions, one.advantages, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            logprobs = policy.model(ids).logits[0].log_softmax(-1)
            for offset, token in enumerate(completion.token_ids):
                logprob = logprobs[len(prompt) - 1 + offset, token]
                loss = loss - advantage * (logprob - logprob.detach()).exp() / total
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in parameters])
    policy.model.zero_grad()
    return float(loss.detach()), gradient


@pytest.mark.parametrize("batch", [ragged, alike])
def test_the_update_is_the_one_of_the_definition(policy, batch):
    groups = batch(policy)
    loss, gradient = reference(policy, groups)
    report, ours = update(policy, groups)
    assert report.loss == pytest.approx(loss, abs=1e-5)
    assert gradient.norm() > 0.01
    assert close(ours, gradient)
    assert report.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-3)


def test_the_lean_pass_leaves_long_texts_to_the_other_way(qwen, monkeypatch):
    """It would hold each score of attention: its memory is bounded, its result the same."""
    taken: list[int] = []
    run = lean.LeanModel.run
    monkeypatch.setattr(
        lean.LeanModel, "run", lambda self, *args: taken.append(1) or run(self, *args)
    )
    _, gradient = update(qwen, ragged(qwen))
    assert taken
    taken.clear()
    monkeypatch.setattr(lean, "SCORES_MAX", 1)
    _, same = update(qwen, ragged(qwen))
    [sampled] = generate(qwen, ["1+1="], 2, Sampling(1.0, 1.0, 4), 0, 0)
    assert not taken
    assert close(same, gradient)
    monkeypatch.undo()
    [again] = generate(qwen, ["1+1="], 2, Sampling(1.0, 1.0, 4), 0, 0)
    assert [c.token_ids for c in sampled] == [c.token_ids for c in again]


def test_a_long_prompts_own_scores_count_against_the_lean_pass(qwen):
    """Its rows may be short: 1,500 tokens of prompt keep 30 x 9 x 1,500^2 scores in SmolLM2."""
    config = qwen.model.config
    each = config.num_hidden_layers * config.num_attention_heads
    assert lean.scores_of_rows(qwen.model, 2, 8, 12, 1500) == each * 2 * (8 * 12 * 1512 + 1500**2)


def test_a_large_model_with_an_adapter_does_not_take_the_lean_pass():
    """It would make base + BA, and gradients of both, for each micro-batch."""
    limit = lean.ADAPTED_PARAMETERS_MAX
    assert lean.trains(10 * limit, 0)
    assert lean.trains(limit, 1)
    assert not lean.trains(limit + 1, 1)


@pytest.mark.parametrize("batch", [ragged, alike])
def test_order_and_micro_batches_do_not_matter(policy, batch):
    groups = batch(policy)
    report, gradient = update(policy, groups)
    turned = [
        replace(g, completions=g.completions[::-1], advantages=g.advantages[::-1])
        for g in reversed(groups)
    ]
    for other, tokens in ((turned, MANY), (groups, 40), (turned, 1)):
        again, same = update(policy, other, micro_batch_tokens=tokens)
        assert again.loss == pytest.approx(report.loss, abs=1e-5)
        assert again.own_logprob == pytest.approx(report.own_logprob, abs=1e-5)
        assert close(same, gradient)


def test_a_batch_is_the_weighted_sum_of_its_groups(qwen):
    groups = ragged(qwen)
    whole, gradient = update(qwen, groups)
    parts = [update(qwen, [one]) for one in groups]
    shares = [report.trained_tokens / whole.trained_tokens for report, _ in parts]
    assert whole.loss == pytest.approx(
        sum(share * report.loss for share, (report, _) in zip(shares, parts, strict=True)),
        abs=1e-5,
    )
    total = sum(share * part for share, (_, part) in zip(shares, parts, strict=True))
    assert close(gradient, total)


def test_sequence_mean_weighs_completions_alike(qwen):
    groups = [group(qwen, "1+1=", ["2", "1234567"], [1.0, -1.0])]
    report, _ = update(qwen, groups, replace(SPEC, loss="sapo, aggregation=sequence_mean"))
    assert report.loss == pytest.approx(0.0, abs=1e-6)
    report, _ = update(qwen, groups)
    assert report.loss == pytest.approx((-2 + 8) / 10, abs=1e-6)


def test_the_end_of_sequence_token_is_trained(qwen):
    ended = group(qwen, "1+1=", ["2", "3"], [1.0, -1.0])
    cut = replace(
        ended,
        completions=tuple(
            replace(c, token_ids=c.token_ids[:-1], finish_reason=FinishReason.LENGTH)
            for c in ended.completions
        ),
    )
    with_eos, one = update(qwen, [ended])
    without, other = update(qwen, [cut])
    assert (with_eos.trained_tokens, without.trained_tokens) == (4, 2)
    assert not close(one, other)


def test_foreign_text_is_encoded_again_and_ended_where_it_ended(qwen):
    own = group(qwen, "1+1=", ["2", "33"], [1.0, -1.0])
    strange = tuple(replace(c, token_ids=(1, 2, 3), logprobs=(0.0,) * 3) for c in own.completions)
    foreign = replace(own, completions=strange, own_tokens=False)
    report, gradient = update(qwen, [foreign])
    same, expected = update(qwen, [own])
    assert report.trained_tokens == same.trained_tokens == 5
    assert torch.equal(gradient, expected)
    assert report.foreign_logprob == same.own_logprob
    assert math.isnan(report.own_logprob)
    assert math.isnan(same.foreign_logprob)


def test_of_another_machine_the_text_that_was_rewarded_is_trained_on(qwen):
    honest = group(qwen, "1+1=", ["2", "13"], [1.0, -1.0])
    sent = replace(honest, source="worker")
    _, plain = update(qwen, [honest])
    assert close(update(qwen, [sent])[1], plain)  # tokens and text are one
    edited = replace(honest.completions[1], text="2")  # the tokens of 13, rewarded as 2
    lied = replace(sent, completions=(edited, honest.completions[1]))
    asked = group(qwen, "1+1=", ["2", "13"], [1.0, -1.0], own=False)
    one, other = (
        replace(g, completions=g.completions[:1], advantages=(1.0,)) for g in (lied, asked)
    )
    other = replace(other, completions=(edited,))
    assert close(update(qwen, [one])[1], update(qwen, [other])[1])
    believed = replace(one, source="")  # what it would have taught
    assert not close(update(qwen, [believed])[1], update(qwen, [other])[1])


def test_cut_foreign_text_gets_no_end(qwen):
    cut = group(qwen, "1+1=", ["2", "33"], [1.0, -1.0], own=False)
    cut = replace(
        cut,
        completions=tuple(replace(c, finish_reason=FinishReason.LENGTH) for c in cut.completions),
    )
    assert update(qwen, [cut])[0].trained_tokens == 3


def test_completions_too_long_for_the_context_are_skipped_and_counted(qwen):
    groups = [group(qwen, "1+1=", ["2", "3", "9" * 200], [1.0, -0.5, -0.5], own=False)]
    report, gradient = update(qwen, groups)
    short = [group(qwen, "1+1=", ["2", "3"], [0.75, -0.75], own=False)]  # centred again
    assert report.skipped_completions == 1
    assert torch.equal(gradient, update(qwen, short)[1])


@pytest.mark.parametrize("method", ["pass_k", "mc_grpo", "gapo", "opo", "novelty"])
def test_a_baseline_that_is_no_mean_stays_where_a_completion_is_skipped(qwen, method):
    """Wrong answers that teach nothing are not pushed down for another's length."""
    texts = ["r" * 90, "2", "33", "4", "9" * 200]
    made = group(qwen, "1+1=", texts, [0.0] * 5, own=False).completions
    said = tuple(replace(each, logprobs=(-float(len(each.text)),)) for each in made)
    told = of_completions(said, (1.0, 0.0, 0.0, 0.0, 0.0))
    (worth,) = advantages([told], ADVANTAGES[method][0]())
    whole = training_group("1+1=", made, worth, own_tokens=False)
    assert advantages_of(qwen, whole) == [pytest.approx(a) for a in worth[:-1] if a is not None]


def advantages_of(policy: Policy, *groups: TrainingGroup) -> list[float]:
    """Of all rows, as they are trained on."""
    prepared = Encoder(policy, SPEC, None, OBJECTIVES["sapo"]).prepare(groups)
    return [row.advantage for unit in prepared.units for row in unit.rows]


def test_the_baseline_of_a_larger_group_stays_where_a_completion_is_skipped(qwen):
    """Of a drawn group some completions are kept, and a hint makes a group of its own: all of its
    completions may be right."""
    kept = group(qwen, "1+1=", ["2", "3", "9" * 200], [0.9, 0.7, 0.9], own=False)
    assert advantages_of(qwen, kept) == [0.9, 0.7]
    alike = group(qwen, "1+1=", ["2", "3", "9" * 200], [-0.5, -0.5, 1.0], own=False)
    assert advantages_of(qwen, alike) == [0.0, 0.0]  # only the one that does not fit was right


def test_supervised_answers_have_no_part_in_a_baseline(qwen):
    """They joined after the advantages, with an advantage that says nothing."""
    made = group(qwen, "1+1=", ["2", "3", "9" * 200, "two"], [1.0, -0.25, -0.75, 1.0])
    guided = replace(made, guided=1, guided_weight=0.5)
    assert advantages_of(qwen, guided) == pytest.approx([0.625, -0.625, 1.0])
    whole = replace(group(qwen, "1+1=", ["2", "3", "9" * 200], [1.0, -1.0, 1.0]), guided=1)
    lost = replace(whole, guided_weight=0.5)  # the supervised one does not fit
    assert advantages_of(qwen, lost) == [1.0, -1.0]
    assert advantages_of(qwen, replace(whole, shaping=0.1)) == [1.0, -1.0]


def test_tokens_that_the_policy_does_not_have_are_skipped_and_counted(policy):
    whole = group(policy, "1+1=", ["2", "3", "4"], [1.0, -0.5, -0.5])
    first, second, third = whole.completions
    for unknown in (policy.vocabulary, 2**32 - 1):
        odd = replace(third, token_ids=(*third.token_ids[:-1], unknown))
        report, gradient = update(policy, [replace(whole, completions=(first, second, odd))])
        assert report.skipped_completions == 1
        assert gradient.norm() > 0.0


def test_foreign_texts_beyond_the_run_are_skipped_and_own_ones_are_not(qwen):
    spec = replace(SPEC, completion_chars_max=3)
    swamp = group(qwen, "1+1=", ["222", "3", "3333", "9" * 90], [1.0, -0.4, -0.3, -0.3], own=False)
    report, gradient = update(qwen, [swamp], spec)
    assert (report.skipped_completions, report.trained_tokens) == (2, 4 + 2)
    within = group(qwen, "1+1=", ["222", "3"], [0.7, -0.7], own=False)
    assert close(gradient, update(qwen, [within], spec)[1])
    own = group(qwen, "1+1=", ["2", "3333"], [1.0, -1.0])
    assert update(qwen, [own], spec)[0].skipped_completions == 0


def test_a_foreign_answer_that_is_long_in_our_tokens_is_trained_on_as_one_of_the_runs_length(qwen):
    """Ours are bytes: an answer of two tokens elsewhere may be ten of them here."""
    spec = replace(SPEC, completion_tokens_max=4)
    long = group(qwen, "1+1=", ["ninety nine", "3"], [1.0, -1.0], own=False)
    report, gradient = update(qwen, [long], spec)
    assert (report.skipped_completions, report.trained_tokens) == (0, 12 + 2)
    first, second = (
        update(qwen, [replace(long, completions=(c,), advantages=(a,))], SPEC)[1]
        for c, a in zip(long.completions, long.advantages, strict=True)
    )
    assert close(gradient, (5 * first + 2 * second) / 7)  # each a mean over its own tokens
    whole = update(qwen, [long], SPEC)[1]
    assert close(whole, (12 * first + 2 * second) / 14)


def test_rows_that_memory_does_not_hold_are_skipped_and_counted(policy):
    groups = [group(policy, "1+1=", ["2", "3", "9" * 50], [1.0, -0.5, -0.5])]
    trainer = GroupTrainer(policy, SPEC, MANY, row_tokens_max=40)
    report = trainer.train(groups)
    assert (report.skipped_completions, report.trained_tokens) == (1, 4)
    assert update(policy, groups, micro_batch_tokens=40)[0].skipped_completions == 0


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_not_made(qwen, spoilt):
    trainer = GroupTrainer(qwen, SPEC, MANY)
    weight = next(qwen.model.parameters())
    if spoilt == "loss":
        bad = [group(qwen, "1+1=", ["2", "3"], [math.nan, 1.0])]
    else:
        weight.register_hook(lambda grad: grad * math.inf)
        bad = ragged(qwen)
    before = [p.detach().clone() for p in qwen.model.parameters()]
    report = trainer.train(bad)
    assert not (math.isfinite(report.loss) and math.isfinite(report.grad_norm))
    assert (report.policy_version, report.trained_tokens) == (0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, qwen.model.parameters(), strict=True))
    assert all(p.grad is None for p in qwen.model.parameters())
    assert not trainer.optimizer.state


def test_groups_without_advantage_change_nothing(qwen):
    groups = ragged(qwen)
    idle = group(qwen, "2+2=", ["4", "4"], [0.0, 0.0])
    report, gradient = update(qwen, groups)
    again, same = update(qwen, [idle, *groups])
    assert torch.equal(gradient, same)
    assert (again.loss, again.trained_tokens) == (report.loss, report.trained_tokens)


def test_a_batch_without_any_advantage_is_no_update(qwen):
    report, gradient = update(qwen, [group(qwen, "2+2=", ["4", "4"], [0.0, 0.0])])
    assert (report.policy_version, report.trained_tokens, report.grad_norm) == (0, 0, 0.0)
    assert not gradient.any()
    assert update(qwen, [])[0].loss == 0.0


def test_one_update_per_batch_never_clips_and_several_do(qwen):
    groups = ragged(qwen)
    spec = TrainerSpec("test", learning_rate=0.01, step_guard=False, foreign_weighting="none")
    assert GroupTrainer(qwen, spec, MANY).train(groups).clip_fraction == 0.0
    several = GroupTrainer(qwen, replace(spec, updates_per_batch=4), MANY).train(groups)
    assert several.clip_fraction > 0.0
    assert several.policy_version == 4


def test_old_log_probs_are_those_before_the_first_update(qwen):
    groups = ragged(qwen)
    expected = GroupTrainer(qwen, SPEC, MANY).train(groups)
    fresh = GroupTrainer(qwen, replace(SPEC, updates_per_batch=3), MANY)
    with_old = fresh.train(groups)
    assert with_old.own_logprob != expected.own_logprob  # the policy has moved in between
    assert math.isfinite(with_old.loss)


def test_the_gradient_is_clipped_to_the_norm(qwen):
    report, gradient = update(qwen, ragged(qwen), replace(SPEC, grad_norm_max=0.01))
    assert report.grad_norm > 0.01
    assert float(gradient.norm()) == pytest.approx(0.01, rel=1e-3)


def test_foreign_tokens_that_the_policy_finds_unlikely_teach_nothing(policy):
    texts, advantages = ["14", "77 join us"], [1.0, -0.5]
    foreign = group(policy, "7+7=", texts, advantages, own=False)
    rows = GroupTrainer(policy, SPEC, MANY).logprobs([foreign])[0]
    floor = sorted(value for row in rows for value in row)[5] - 1e-3  # five are below
    report, _ = update(policy, [foreign], replace(SPEC, foreign_logprob_min=floor))
    kept = [sum(value >= floor for value in row) for row in rows]
    assert report.unlikely_tokens == sum(map(len, rows)) - sum(kept) == 5
    expected = -sum(a * n for a, n in zip(advantages, kept, strict=True)) / sum(map(len, rows))
    assert report.loss == pytest.approx(expected)  # each ratio is one


def test_the_least_log_prob_is_for_foreign_tokens_alone(policy):
    own, foreign = ragged(policy)[:2], ragged(policy)[2:]
    everything = replace(SPEC, foreign_logprob_min=-1e-9)  # no token is as likely as that
    report, gradient = update(policy, foreign, everything)
    assert report.unlikely_tokens == report.trained_tokens > 0
    assert not gradient.any()
    report, gradient = update(policy, own, everything)
    assert report.unlikely_tokens == 0
    assert torch.equal(gradient, update(policy, own)[1])
    nothing = replace(SPEC, foreign_logprob_min=-1e9)
    assert torch.equal(update(policy, foreign, nothing)[1], update(policy, foreign)[1])


def test_training_makes_good_answers_likelier(qwen):
    groups = [group(qwen, "1+1=", ["2", "3"], [1.0, -1.0])]
    trainer = GroupTrainer(qwen, TrainerSpec("test", learning_rate=1e-3), MANY)
    before = [sum(row) for row in trainer.logprobs(groups)[0]]
    for _ in range(5):
        trainer.train(groups)
    after = [sum(row) for row in trainer.logprobs(groups)[0]]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_a_failed_update_leaves_the_policy_as_it_was(qwen):
    trainer = GroupTrainer(qwen, SPEC, 1)
    before = [p.detach().clone() for p in qwen.model.parameters()]
    forward, passes = trainer._forward, []

    def fail_at_last(*given):
        passes.append(1)
        if len(passes) > 1:  # the gradient of the first is there by then
            raise IndexError
        return forward(*given)

    trainer._forward = fail_at_last
    with pytest.raises(IndexError):
        trainer.train(ragged(qwen))
    assert len(passes) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, qwen.model.parameters(), strict=True))
    assert all(p.grad is None for p in qwen.model.parameters())
    assert trainer.policy_version == 0


def test_all_layers_share_one_mask_of_rows_with_a_common_prompt(qwen, monkeypatch):
    """A layer that makes one of its own keeps it for its gradient: layers x rows x tokens²."""
    monkeypatch.setattr(lean, "SCORES_MAX", 1)
    trainer = GroupTrainer(qwen, SPEC, MANY)
    units = trainer._encoder.prepare(ragged(qwen)).units
    masks: set[int] = set()

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 4 and torch.isneginf(tensor).any():
            masks.add(tensor.data_ptr())
        return tensor

    def count() -> int:
        masks.clear()
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            alive = trainer._forward(units)
        assert all(each.requires_grad for each in alive)
        return len(masks)

    assert count() == 1
    monkeypatch.setattr(trainer_module, "_attention_mask", lambda _policy, seen, _count: seen)
    assert count() == qwen.model.config.num_hidden_layers > 1
