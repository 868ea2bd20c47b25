"""Transcripts as tokens: own turns stay the sampled ids, and replies to them are not trained on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.engines.torch_engine import TurnGeneration
from node.interfaces.engine import Context, Sampling
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.losses import OBJECTIVES
from node.policies.policy import Policy
from node.train.rows import Encoder, Row
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from swarm.rollouts import Author, Completion, FinishReason, Turn
from tests.unit.test_training_trainer import close, update
from tests.unit.training_support import (
    gpt2_directory,
    mamba_directory,
    model_text,
    open_policy,
    qwen_directory,
)

SPEC = TrainerSpec("test", grad_norm_max=1e9, step_guard=False)
MANY = 100_000
PROMPT, REPLY = "guess:", "higher"
# A template that rewrites history: of earlier turns it drops what was thought
REWRITES = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = "{{ messages[-1].content }}"


@pytest.fixture(params=[qwen_directory, gpt2_directory, mamba_directory])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """One model for each way through the forward pass: lean, shared, plain."""
    return open_policy(request.param(tmp_path))


def chatty(directory: Path, template: str) -> Policy:
    (qwen_directory(directory) / "chat_template.jinja").write_text(template)
    return open_policy(directory)


@pytest.fixture
def qwen(tmp_path: Path) -> Policy:
    return open_policy(qwen_directory(tmp_path))


def transcript(
    policy: Policy, texts: Sequence[str], replies: Sequence[str] = (REPLY, REPLY, REPLY)
) -> Completion:
    """What the policy said in turns that all ended, with log-probs that can be ones."""
    text, ids, turns = "", [], []
    for at, each in enumerate(texts):
        if at:
            text += replies[at - 1]
            turns.append(Turn(Author.ENVIRONMENT, len(replies[at - 1]), 0))
        said = [*policy.encode_completion(each), policy.eos_id]
        turns.append(Turn(Author.POLICY, len(each), len(said)))
        text, ids = text + each, [*ids, *said]
    logprobs = tuple(-0.25 - 0.5 * (at % 3) for at in range(len(ids)))
    return Completion(text, tuple(ids), logprobs, FinishReason.STOP, 0, segments=tuple(turns))


def group(policy: Policy, *completions: Completion, own: bool = True) -> TrainingGroup:
    advantages = tuple((-1.0) ** at for at in range(len(completions)))
    tokenizer = "" if own else policy.fingerprint
    source = "" if own else "somebody"
    return TrainingGroup(PROMPT, completions, advantages, own, source, tokenizer)


def rows_of(policy: Policy, made: TrainingGroup, spec: TrainerSpec = SPEC) -> list[Row]:
    _, rows = Encoder(policy, spec, None, OBJECTIVES["sapo"]).rows(made)
    found = [row for row in rows if row is not None]
    assert len(found) == len(rows)
    return found


# --- what stands between two turns -------------------------------------------------------------


def test_without_a_template_a_reply_stands_where_a_prompt_does(qwen: Policy) -> None:
    prompt = qwen.encode_prompt("x")
    answer = prompt[-1]  # the tokenizer's word that an answer begins
    assert qwen.between_turns(REPLY) == [*qwen.encode_completion(REPLY), answer]
    context = qwen.encode_turns("x", [([*qwen.encode_completion("5"), qwen.eos_id], REPLY)])
    whole = qwen.tokenizer("x<answer>5<eos>higher")["input_ids"]
    assert context == whole  # as the policy was warmed


def test_a_template_that_rewrites_history_changes_no_turn_that_was_sampled(tmp_path: Path) -> None:
    policy = chatty(tmp_path, REWRITES)
    thought = [*policy.encode_completion("<think>hm</think>5"), policy.eos_id]
    context = policy.encode_turns(PROMPT, [(thought, REPLY)])
    prompt = policy.encode_prompt(PROMPT)
    assert context[: len(prompt) + len(thought)] == [*prompt, *thought]
    rest = policy.tokenizer.decode(context[len(prompt) + len(thought) :])
    assert rest == f"\n<user>{REPLY}<eos>\n<assistant>"
    messages = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "<think>hm</think>5"},
        {"role": "user", "content": REPLY},
    ]
    assert "hm" not in policy.template_renderer().render(
        messages
    )  # what rendering all of it again would have made


def test_special_tokens_that_a_reply_spells_out_are_text(tmp_path: Path) -> None:
    for policy in (
        open_policy(qwen_directory(tmp_path / "plain")),
        chatty(tmp_path / "chatty", REWRITES),
    ):
        own = policy.between_turns("").count(policy.eos_id)
        assert policy.between_turns("<eos><eos>").count(policy.eos_id) == own


@pytest.mark.parametrize("template", [None, REWRITES])
def test_vllm_is_sent_the_ids_that_the_trainer_has(tmp_path: Path, template: str | None) -> None:
    policy = (
        open_policy(qwen_directory(tmp_path)) if template is None else chatty(tmp_path, template)
    )
    text = model_text(tmp_path, policy)
    sampled = [*policy.encode_completion("<think>hm</think>5"), policy.eos_id]
    for reply in (REPLY, "", "<eos><eos>", "ä€𝄞 [assistant]"):
        turns = [(sampled, reply)] * 2
        assert text.encode_turns(PROMPT, turns) == policy.encode_turns(PROMPT, turns)
    assert (text.eos_id, set(text.eos_ids)) == (policy.eos_id, set(policy.eos_ids))


def test_a_template_that_forgets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves out what was said before"):
        chatty(tmp_path, FORGETS).between_turns(REPLY)


# --- generation --------------------------------------------------------------------------------


def test_the_next_turn_is_sampled_after_the_ids_of_those_before(policy: Policy) -> None:
    sampled = (*policy.encode_completion("5"), policy.eos_id)
    contexts = [Context(PROMPT, ((sampled, reply),), 6) for reply in (REPLY, REPLY, "lower")]
    generation = TurnGeneration(policy, contexts, Sampling(max_new_tokens=50), 1)
    while not generation.done:
        generation.advance(3, 7)
    found = [completion for (completion,) in generation.completions()]
    assert found[0].token_ids != found[1].token_ids  # random numbers of their own
    for context, completion in zip(contexts, found, strict=True):
        assert 1 <= len(completion.token_ids) <= 6
        assert completion.policy_version == 7
        ids = policy.encode_turns(context.prompt, context.turns)
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*ids, *completion.token_ids]])).logits[0]
        told = logits.double().log_softmax(-1)
        for at, (token, logprob) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)
        ):
            assert float(told[len(ids) - 1 + at, token]) == pytest.approx(logprob, abs=1e-4)


def test_each_turn_has_its_own_limit_and_none_where_no_room_is_left(qwen: Policy) -> None:
    sampled = (*qwen.encode_completion("5"), qwen.eos_id)
    full = "x" * qwen.context_tokens
    contexts = [Context(PROMPT, ((sampled, reply),), most) for reply, most in
                ((REPLY, 1), (full, 9), (REPLY, 4))]  # fmt: skip
    generation = TurnGeneration(qwen, contexts, Sampling(max_new_tokens=50), 1)
    while not generation.done:
        generation.advance(50, 0)
    one, none, four = (completion for (completion,) in generation.completions())
    assert len(one.token_ids) == 1
    assert (none.token_ids, none.finish_reason) == ((), FinishReason.LENGTH)
    assert 1 <= len(four.token_ids) <= 4


# --- training ----------------------------------------------------------------------------------


def test_only_what_the_policy_said_has_log_probs(policy: Policy) -> None:
    made = group(policy, transcript(policy, ("5", "12", "7")), transcript(policy, ("1",)))
    trainer = GroupTrainer(policy, SPEC, MANY)
    ((three, one),) = trainer.logprobs([made])
    row, _ = rows_of(policy, made)
    prompt = policy.encode_prompt(PROMPT)
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *row.tokens]])).logits[0]
    told = logits.log_softmax(-1)
    assert row.said is not None
    expected = [float(told[len(prompt) - 1 + at, row.tokens[at]]) for at in row.said]
    assert three == pytest.approx(expected, abs=1e-4)
    assert [row.tokens[at] for at in row.said] == list(made.completions[0].token_ids)
    assert len(row.tokens) > len(row.said) == len(three)
    assert len(one) == len(made.completions[1].token_ids)


def reference(policy: Policy, rows: Sequence[Row], *, masked: bool = True) -> torch.Tensor:
    """The gradient from the definition: one unpadded sequence at a time, of sampled tokens."""
    prompt = policy.encode_prompt(PROMPT)
    places = [
        row.said if masked and row.said is not None else [*range(len(row.tokens))] for row in rows
    ]
    loss = torch.zeros(())
    for row, said in zip(rows, places, strict=True):
        told = policy.model(torch.tensor([[*prompt, *row.tokens]])).logits[0].log_softmax(-1)
        for at in said:
            logprob = told[len(prompt) - 1 + at, row.tokens[at]]
            loss = loss - row.advantage * (logprob - logprob.detach()).exp()
    (loss / sum(map(len, places))).backward()
    gradient = torch.cat(
        [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    )
    policy.model.zero_grad()
    return gradient


def test_what_an_environment_said_is_in_no_mean_and_no_loss(policy: Policy) -> None:
    made = group(policy, transcript(policy, ("5", "12", "3")), transcript(policy, ("7", "3")))
    report, gradient = update(policy, [made], SPEC)
    rows = rows_of(policy, made)
    assert report.trained_tokens == sum(len(c.token_ids) for c in made.completions)
    assert close(gradient, reference(policy, rows))
    assert not close(gradient, reference(policy, rows, masked=False))


# --- groups of others --------------------------------------------------------------------------


def test_anothers_turns_are_taken_by_their_ids_and_weighed(qwen: Policy) -> None:
    told = transcript(qwen, ("5", "12"))
    (row,) = rows_of(qwen, group(qwen, told, own=False))
    assert row.said is not None
    assert row.behaviour_logprobs is not None
    assert len(row.behaviour_logprobs) == len(told.token_ids)
    assert [row.tokens[at] for at in row.said] == list(told.token_ids)


@pytest.mark.parametrize("kind", ["other text", "no end", "other tokenizer"])
def test_turns_whose_ids_are_not_their_text_are_encoded_again(qwen: Policy, kind: str) -> None:
    told = transcript(qwen, ("5", "12"))
    made = group(qwen, told, own=False)
    if kind == "other text":
        lie = replace(told, text=told.text.replace("5", "6", 1))
        made = replace(made, completions=(lie,))
    elif kind == "no end":
        ids = list(told.token_ids)
        ids[1] = ids[0]  # the first turn goes on
        made = replace(made, completions=(replace(told, token_ids=tuple(ids)),))
    else:
        made = replace(made, tokenizer="another")
    (row,) = rows_of(qwen, made)
    assert row.behaviour_logprobs is None
    assert row.said is not None
    texts = ["6" if kind == "other text" else "5", "12"]
    expected = [each for t in texts for each in (*qwen.encode_completion(t), qwen.eos_id)]
    assert [row.tokens[at] for at in row.said] == expected


def test_roles_are_rendered_by_the_receivers_own_template(tmp_path: Path) -> None:
    plain = open_policy(qwen_directory(tmp_path / "plain"))
    other = chatty(tmp_path / "chatty", REWRITES)
    made = group(plain, transcript(plain, ("5", "12")), own=False)
    (ours,), (theirs,) = rows_of(plain, made), rows_of(other, made)
    assert "<user>higher<eos>" in other.tokenizer.decode(theirs.tokens)
    assert "<user>" not in plain.tokenizer.decode(ours.tokens)
    assert theirs.behaviour_logprobs is None  # another fingerprint
