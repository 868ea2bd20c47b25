"""Completions from drafts: what is kept, by which log-probs, and what follows."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from node.config import load_config
from node.engines import torch_engine
from node.engines.drafts import DraftGeneration
from node.interfaces.engine import Request, Sampling
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.drafts import Draft, DraftBank
from node.methods.generation import Speculative, speculative
from node.methods.losses import OBJECTIVES
from node.policies.policy import Policy
from node.train import frames
from node.train.process import InProcessTrainer, open_trainer
from node.train.rows import Encoder, Row
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason, Task, version_spans
from tests import support
from tests.unit.test_training_generation import NEW, OLD, PROMPTS, SAMPLING, Models
from tests.unit.test_training_generation import models as models
from tests.unit.test_training_generation import qwen as qwen
from tests.unit.training_support import (
    generate,
    gpt2_directory,
    open_policy,
    qwen_directory,
    reference_logprobs,
)

EACH, SEED = 4, 1
PLAIN = Speculative(lenience=-0.5)  # below 0: so small a change of weights keeps nearly all else
KEEPS_ALL, KEEPS_NONE = Speculative(lenience=20.0), Speculative(lenience=-20.0)
ERROR_MAX = 1e-4


def drafts_of(models: Models) -> list[Draft]:
    """By the old policy, `EACH` of each prompt."""
    groups = generate(models.old, PROMPTS, EACH, SAMPLING, 2, OLD)
    return [
        Draft(prompt, made.token_ids, made.logprobs)
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for made in group
    ]


def redraft(
    policy: object,
    drafts: Sequence[Draft],
    set_to: Speculative = PLAIN,
    *,
    seed: int = SEED,
    steps: int = 100,
    sampling: Sampling = SAMPLING,
) -> list[Completion]:
    generation = DraftGeneration(policy, drafts, set_to, sampling, seed)  # type: ignore[arg-type]
    while not generation.done:
        generation.advance(steps, NEW)
    return [made for (made,) in generation.completions()]


def kept(made: Completion) -> int:
    return made.splices[0] if made.splices else 0


def test_what_is_kept_is_what_the_function_says_and_all_log_probs_are_of_now(models):
    drafts = drafts_of(models)
    made = redraft(models.new, drafts)
    uniforms = torch_engine.uniforms_of(
        [Request(each.prompt) for each in drafts], SAMPLING.max_new_tokens, SEED, "keep"
    )
    lengths = set()
    for draft, ours, drawn in zip(drafts, made, uniforms, strict=True):
        as_drafted = replace(ours, token_ids=draft.token_ids)
        now = reference_logprobs(models.new, draft.prompt, as_drafted, SAMPLING)
        assert kept(ours) == speculative(draft.logprobs, now, drawn.tolist(), PLAIN)
        assert ours.token_ids[: kept(ours)] == draft.token_ids[: kept(ours)]
        said = reference_logprobs(models.new, draft.prompt, ours, SAMPLING)
        assert ours.logprobs == pytest.approx(said, abs=ERROR_MAX)
        assert ours.text == models.new.decode(list(ours.token_ids))
        assert ours.policy_version == NEW
        assert not ours.spans
        assert len(ours.token_ids) <= SAMPLING.max_new_tokens
        ended = ours.token_ids[-1] in models.new.eos_ids
        assert ours.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(ours.token_ids) == SAMPLING.max_new_tokens
        lengths.add(kept(ours))
    assert len(lengths) > 2  # some at once, some never


def test_drafts_of_the_policy_itself_are_kept_whole(models):
    drafts = drafts_of(models)
    made = redraft(models.old, drafts, Speculative(lenience=1e-3))  # sums round
    for ours, draft in zip(made, drafts, strict=True):
        assert (ours.token_ids, ours.splices) == (draft.token_ids, (len(draft.token_ids),))


def test_nothing_kept_and_no_drafts_are_samples_of_the_policy(models):
    drafts = drafts_of(models)
    plain = [
        made for (made,) in generate(models.new, [d.prompt for d in drafts], 1, SAMPLING, SEED, NEW)
    ]
    from_nothing = redraft(models.new, [Draft(each.prompt) for each in drafts])
    assert [each.token_ids for each in from_nothing] == [each.token_ids for each in plain]
    assert not any(each.splices for each in from_nothing)
    none_kept = redraft(models.new, drafts, KEEPS_NONE)
    assert [each.token_ids for each in none_kept] == [each.token_ids for each in plain]
    assert redraft(models.new, drafts, seed=SEED + 1) != redraft(models.new, drafts)


def test_all_is_kept_where_every_token_may_be(models):
    drafts = drafts_of(models)
    for ours, draft in zip(redraft(models.new, drafts, KEEPS_ALL), drafts, strict=True):
        assert ours.token_ids == draft.token_ids


def test_segments_batches_and_passes_change_nothing_but_rounding(models, monkeypatch):
    drafts = drafts_of(models)
    whole = redraft(models.new, drafts)
    assert redraft(models.new, drafts, steps=1) == whole
    three = 3 * models.new.vocabulary  # drafts at a time, and one token of each
    monkeypatch.setattr(torch_engine, "LOGITS_MAX", three)
    again = redraft(models.new, drafts)
    assert [each.token_ids for each in again] == [each.token_ids for each in whole]
    for ours, theirs in zip(again, whole, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=ERROR_MAX)


def test_a_prompt_of_one_token_without_anything_kept_begins_anew(tmp_path, monkeypatch):
    policy = open_policy(gpt2_directory(tmp_path / "model"))
    monkeypatch.setattr(type(policy), "encode_prompt", lambda self, prompt: [ord(prompt[-1])])
    drafts = [Draft(prompt, (5, 6, 7), (-0.1,) * 3) for prompt in "ab"]
    for draft, ours in zip(drafts, redraft(policy, drafts, KEEPS_NONE), strict=True):
        said = reference_logprobs(policy, draft.prompt, ours, SAMPLING)
        assert ours.logprobs == pytest.approx(said, abs=ERROR_MAX)


def test_weights_that_come_meanwhile_make_the_rest(qwen):
    drafts = drafts_of(qwen)
    qwen.become(qwen.old)
    generation = DraftGeneration(qwen.policy, drafts, PLAIN, SAMPLING, SEED)
    generation.advance(2, OLD)
    qwen.become(qwen.new)
    generation.weights_changed()
    while not generation.done:
        generation.advance(4, NEW)
    mixed = 0
    for draft, (ours,) in zip(drafts, generation.completions(), strict=True):
        begin = 0
        for version, count in version_spans(ours):
            said = reference_logprobs(qwen.by_version(version), draft.prompt, ours, SAMPLING)
            here = slice(begin, begin + count)
            assert ours.logprobs[here] == pytest.approx(said[here], abs=ERROR_MAX)
            begin += count
        assert begin == len(ours.token_ids)
        mixed += len(version_spans(ours)) == 2 and kept(ours) > 0
    assert mixed


def test_weights_that_come_between_drafts_weigh_those_that_are_left(qwen, monkeypatch):
    monkeypatch.setattr(torch_engine, "ROWS_MAX", 4)
    drafts = drafts_of(qwen)
    qwen.become(qwen.old)
    generation = DraftGeneration(qwen.policy, drafts, KEEPS_ALL, SAMPLING, SEED)
    generation.advance(4, OLD)
    assert not generation.done  # one pass of several
    qwen.become(qwen.new)
    generation.weights_changed()
    while not generation.done:
        generation.advance(4, NEW)
    made = [each for (each,) in generation.completions()]
    assert [each.token_ids for each in made] == [draft.token_ids for draft in drafts]
    assert [each.policy_version for each in made].count(OLD) == 4
    for draft, ours in zip(drafts, made, strict=True):
        policy = qwen.by_version(ours.policy_version)
        said = reference_logprobs(policy, draft.prompt, ours, SAMPLING)
        assert ours.logprobs == pytest.approx(said, abs=ERROR_MAX)


def test_prompts_are_run_once_for_all_their_drafts(tmp_path):
    """And what was weighed is not run again to go on from it."""
    policy = open_policy(gpt2_directory(tmp_path / "model"))
    widths = []
    policy.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: widths.append(output.shape[:-1].numel())
    )
    prompt = "a long prompt " * 5
    length = len(policy.encode_prompt(prompt))
    drafts = [Draft(prompt, (5, 6, 7), (-9.0, -9.0, -9.0)) for _ in range(EACH)]
    made = redraft(policy, drafts, KEEPS_ALL)
    assert all(kept(each) == 3 for each in made)
    most = max(len(each.token_ids) for each in made)
    assert sum(widths) <= length + EACH * (most + 1)


def test_an_older_version_weighs_the_drafts_anew(qwen):
    drafts = drafts_of(qwen)
    qwen.become(qwen.old)
    generation = DraftGeneration(qwen.policy, drafts, PLAIN, SAMPLING, SEED)
    generation.advance(1, NEW)
    qwen.become(qwen.new)
    generation.weights_changed()
    while not generation.done:
        generation.advance(4, OLD)
    made = [each for (each,) in generation.completions()]
    expected = redraft(qwen.new, drafts)
    assert [each.token_ids for each in made] == [each.token_ids for each in expected]
    assert {each.policy_version for each in made} == {OLD}


def test_a_draft_is_cut_at_the_limit_and_an_end_is_an_end(qwen):
    policy = qwen.old
    eos = min(policy.eos_ids)
    ids = tuple(range(5, 5 + 20))
    long = Draft("1+1=", ids, (0.0,) * 20)
    ended = Draft("1+1=", (5, eos), (0.0, 0.0))
    first, second = redraft(policy, [long, ended], replace(KEEPS_ALL, lenience=20.0))
    assert first.token_ids == ids[: SAMPLING.max_new_tokens]
    assert first.finish_reason is FinishReason.LENGTH
    assert (second.token_ids, second.finish_reason) == ((5, eos), FinishReason.STOP)
    assert second.text == policy.decode([5, eos])


def test_a_nucleus_is_refused(qwen):
    with pytest.raises(ConfigError, match="set top_p to 1"):
        redraft(qwen.old, [Draft("1+1=")], sampling=replace(SAMPLING, top_p=0.9))


@pytest.mark.slow
@pytest.mark.integration
def test_a_child_makes_the_same_of_drafts(tmp_path):
    spec = TrainerSpec(str(qwen_directory(tmp_path / "model")), device="cpu", threads=1)
    drafts = [Draft("1+1=", (5, 6, 7), (-0.5, -0.5, -0.5)), Draft("2+2=")]

    async def body() -> None:
        here = await InProcessTrainer(spec).redraft(drafts, PLAIN, SAMPLING, SEED)
        async with open_trainer(spec, tmp_path / "data") as trainer:
            there = await trainer.redraft(drafts, PLAIN, SAMPLING, SEED)
            assert await trainer.redraft(drafts, PLAIN, SAMPLING, SEED + 1) != there
        assert here == there
        policy = open_policy(tmp_path / "model")
        assert [c.token_ids for c in redraft(policy, drafts)] == [c.token_ids for c in here]

    support.run(body)


def test_drafts_travel_to_the_child_whole():
    drafts = [Draft("a", (1, 2**31), (-0.25, -3.5)), Draft("b")]
    assert frames.unpack(frames.pack(drafts)) == tuple(drafts)
    made = Completion("x", (1, 2), (-0.5, -0.25), FinishReason.STOP, 3, splices=(1,))
    assert frames.unpack(frames.pack(made)) == made


# --- others' weights -----------------------------------------------------------------------------

TWO = replace(SAMPLING, temperature=1.0, max_new_tokens=2)
MANY, FARTHER = 3000, 1.5


def misfit(policy: Policy, prompt: str, rows: Sequence[Row]) -> float:
    """Chi-square of all tokens that are trained on against the policy, in standard deviations above
    its mean. An ordinary token was sampled, as rows with others are taken by their text."""
    ids = policy.encode_prompt(prompt)
    contexts = {tuple(row.tokens[:at]) for row in rows for at in trained(row)}
    ordinary = [at for at in range(policy.vocabulary) if at < 256 or at in policy.eos_ids]
    next_probs = {}
    for each in contexts:
        with torch.no_grad():
            probs = policy.model(torch.tensor([[*ids, *each]])).logits[0, -1].double().softmax(-1)
        next_probs[each] = probs[ordinary] / probs[ordinary].sum()
    expected = torch.zeros(len(ordinary), dtype=torch.float64)
    seen = torch.zeros_like(expected)
    for row in rows:
        for at in trained(row):
            expected += next_probs[tuple(row.tokens[:at])]
            seen[ordinary.index(row.tokens[at])] += 1
    bins = expected.argsort(descending=True).split(8)  # rare ones together
    found = [(float(seen[each].sum()), float(expected[each].sum())) for each in bins]
    degrees = len(found) - 1
    chi_square = sum((count - usual) ** 2 / usual for count, usual in found)
    return (chi_square - degrees) / (2 * degrees) ** 0.5


def trained(row: Row) -> Sequence[int]:
    return range(len(row.tokens)) if row.said is None else row.said


def shared(models: Models, set_to: Speculative) -> list[Completion]:
    requests = generate(models.old, ["1+1="], MANY, TWO, 2, OLD)[0]
    drafts = [Draft("1+1=", made.token_ids, made.logprobs) for made in requests]
    return redraft(models.new, drafts, set_to, sampling=TWO)


def received(models: Models, made: Sequence[Completion]) -> list[Row]:
    """Rows that a peer of the same tokenizer trains on by the log-probs that came along."""
    sent = TrainingGroup(
        "1+1=", tuple(made), (1.0,) * MANY, own_tokens=False, source="peer",
        tokenizer=models.new.fingerprint,
    )  # fmt: skip
    _, rows = Encoder(models.new, TrainerSpec("test"), None, OBJECTIVES["sapo"]).rows(sent)
    return [row for row in rows if row is not None and row.weighing is not None]


@pytest.mark.parametrize("lenience", [0.5, 0.0], ids=str)
def test_others_train_on_samples_of_the_policy_whose_log_probs_they_weigh_by(qwen, lenience):
    """What was kept of a draft follows another distribution: it is context."""
    with torch.no_grad():  # further from the old one
        for name, each in qwen.new.model.named_parameters():
            each.add_(FARTHER * (each - qwen.old.model.get_parameter(name)))
    made = shared(qwen, Speculative(lenience=lenience))
    rows = received(qwen, made)
    assert {len(row.tokens) - row.count for row in rows} == {0, 1}  # all of both is kept of some
    assert all(len(row.behaviour_logprobs) == row.count == row.tokens_counted for row in rows)
    assert abs(misfit(qwen.new, "1+1=", rows)) < 4.0
    untold = received(qwen, [replace(each, splices=()) for each in made])
    assert misfit(qwen.new, "1+1=", untold) > 8.0


def test_columns_of_a_draft_begin_where_it_ends(qwen):
    group = TrainingGroup(
        "1+1=", (replace(kept_two(qwen.new), splices=(2,)),), (1.0,), own_tokens=False,
        source="peer", tokenizer=qwen.new.fingerprint, token_advantages=((1.0, 2.0, 3.0, 4.0),),
        masks=((True, True, False, True),), teacher_logprobs=((-1.0, -2.0, -3.0, -4.0),),
    )  # fmt: skip
    spec = TrainerSpec("test", teacher_weight=1.0)
    encoder = Encoder(qwen.new, spec, None, OBJECTIVES["hacpo"])
    (row,) = encoder.rows(group)[1]
    assert row is not None
    assert (row.said, row.count, row.advantage) == ([2, 3], 2, 2.5)
    assert row.token_advantages.tolist() == [3.0, 4.0]
    assert row.mask.tolist() == [False, True]
    assert row.teacher.tolist() == [-3.0, -4.0]
    assert row.behaviour.tolist() == pytest.approx([-0.3, -0.4])
    other = replace(group, tokenizer="another")  # by its text: of what drew it nothing is known
    (row,) = encoder.rows(other)[1]
    assert row is not None
    assert (row.said, row.behaviour) == (None, None)
    whole = replace(group, completions=(replace(kept_two(qwen.new), splices=(4,)),))
    assert encoder.rows(whole)[1] == [None]


def kept_two(policy: Policy) -> Completion:
    ids = (*policy.encode_completion("abc"), policy.eos_id)
    return Completion("abc", ids, (-0.1, -0.2, -0.3, -0.4), FinishReason.STOP, 0)


# --- the bank ----------------------------------------------------------------------------------


def task(index: int) -> Task:
    return Task("scripted_sum", "1", "{}", 7, index)


def made_of(*tokens: int) -> Completion:
    return Completion("", tokens, (-0.5,) * len(tokens), FinishReason.STOP, 1)


def test_a_bank_has_the_newest_of_each_task_and_is_bounded():
    bank = DraftBank(tokens_max=6)
    bank.keep(task(1), [made_of(1, 2)])
    bank.keep(task(2), [made_of(3), made_of(4)])
    assert bank.drafts(task(1), "p", 1) == [Draft("p", (1, 2), (-0.5, -0.5))]
    assert bank.drafts(task(2), "p", 3) == [
        Draft("p", (3,), (-0.5,)), Draft("p", (4,), (-0.5,)), Draft("p"),
    ]  # fmt: skip
    bank.keep(task(1), [made_of(5)])  # the newest takes the place
    assert bank.drafts(task(1), "p", 1) == [Draft("p", (5,), (-0.5,))]
    bank.keep(task(3), [made_of(6, 7, 8, 9)])
    assert bank.drafts(task(2), "p", 1) == [Draft("p")]  # done longest ago
    assert len(bank) == 2
    bank.keep(task(4), [made_of(*range(7))])
    assert len(bank) == 0


# --- settings ----------------------------------------------------------------------------------


def test_what_cannot_draft_says_so(tmp_path):
    run = tmp_path / "run.toml"
    common = "[common]\nshare = 0.5\n"

    def load(text: str, **settings: object) -> object:
        head = 'name = "r"\n[[environments]]\nname = "scripted_sum"\n'
        run.write_text(head + text)
        return load_config({"generate": "speculative", **settings}, {}, run).generate

    assert load(common) == (Speculative(lenience=0.5),)
    assert load(common, generate="speculative, lenience=0.1") == (Speculative(lenience=0.1),)
    with pytest.raises(ConfigError, match=r"has no tasks that come again: give it common\.share"):
        load("")
    with pytest.raises(ConfigError, match="top_p must be 1"):
        load(common + "[sampling]\ntop_p = 0.9\n")
    with pytest.raises(ConfigError, match="has no drafts"):
        load(common, engine="vllm")
