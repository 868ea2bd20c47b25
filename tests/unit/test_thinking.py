"""A budget for thoughts: what engines sample, what is trained on, and what is counted."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.config import RunConfig
from node.engines.vllm.unfinished import Piece, Unfinished
from node.interfaces.engine import Request, Sampling
from node.interfaces.prompts import TemplateRules, Thinking
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.losses import OBJECTIVES
from node.policies.policy import Policy, load_policy
from node.train.rows import Encoder
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import TrainerCore
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason
from tests.unit.tasks_support import make_run
from tests.unit.training_support import generate, qwen_directory, reference_logprobs

BUDGET, END = 5, "</t>"
SAMPLING = Sampling(max_new_tokens=14)
OPENS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    policy = load_policy(str(qwen_directory(tmp_path)), "cpu")
    policy.thinking = Thinking(END, BUDGET, forced=True)
    return policy


def test_a_thought_over_the_budget_is_ended_and_told_by_its_log_probs(policy):
    end = policy.encode_special(END)
    plain = replace(policy, thinking=None)
    wanted = generate(plain, ["1+1?"], 8, SAMPLING, 3, 0)[0]
    made = generate(policy, ["1+1?"], 8, SAMPLING, 3, 0)[0]
    assert any(len(each.token_ids) > BUDGET for each in made)
    for old, new in zip(wanted, made, strict=True):
        assert new.token_ids[:BUDGET] == old.token_ids[:BUDGET]
        if len(old.token_ids) > BUDGET:
            assert list(new.token_ids[BUDGET : BUDGET + len(end)]) == end
        told = reference_logprobs(policy, "1+1?", new, SAMPLING)
        assert list(new.logprobs) == pytest.approx(told, abs=1e-4)


def test_without_force_a_thought_over_the_budget_is_cut(policy):
    policy.thinking = Thinking(END, BUDGET)
    for each in generate(policy, ["1+1?"], 8, SAMPLING, 3, 0)[0]:
        assert len(each.token_ids) <= BUDGET
        assert each.finish_reason is not FinishReason.LENGTH or len(each.token_ids) == BUDGET


def test_a_thought_that_ends_in_time_goes_on(policy):
    begun = tuple(policy.encode_completion(f"x{END}"))
    assert len(begun) == BUDGET
    core_made = generate_begun(policy, begun)
    assert all(each.token_ids[:BUDGET] == begun for each in core_made)
    assert all(END not in each.text[len(END) + 1 :] for each in core_made)
    open_thought = tuple(policy.encode_completion("xyz"))
    end = tuple(policy.encode_special(END))
    for each in generate_begun(policy, open_thought):
        if len(each.token_ids) > BUDGET:
            assert each.token_ids[BUDGET : BUDGET + len(end)] == end


def generate_begun(policy: Policy, begun: tuple[int, ...]) -> tuple[Completion, ...]:
    from node.engines.torch_engine import Generation

    request = Request("1+1?", 6, beginning=begun, beginning_logprobs=(-1.0,) * len(begun))
    generation = Generation(policy, [request], SAMPLING, 1)
    while not generation.done:
        generation.advance(50, 0)
    return generation.completions()[0]


# --- what is trained on -------------------------------------------------------------------------


def row_of(policy: Policy, ids: list[int], *, own: bool = True):
    made = Completion(policy.decode(ids), tuple(ids), (-0.5,) * len(ids), FinishReason.STOP, 0)
    told = TrainingGroup(
        "1+1?", (made, made), (1.0, -1.0), own, "" if own else "x", policy.fingerprint
    )
    spec = TrainerSpec("test", foreign_weighting="none")
    _, rows = Encoder(policy, spec, None, OBJECTIVES["sapo"]).rows(told)
    assert rows[0] is not None
    return rows[0]


@pytest.mark.parametrize("own", [True, False])
def test_a_forced_end_is_not_trained_on(policy, own):
    end = policy.encode_special(END)
    ids = [*policy.encode_completion("hmmmm"), *end, *policy.encode_completion("2"), policy.eos_id]
    row = row_of(policy, ids, own=own)
    assert row.mask is not None
    assert [at for at, kept in enumerate(row.mask.tolist()) if not kept] == [
        *range(BUDGET, BUDGET + len(end))
    ]
    for free in ("hmm</t>2", "hmmmmm</t>", "x</t></t>2"):  # ended by the policy, or elsewhere
        assert row_of(policy, [*policy.encode_completion(free), policy.eos_id]).mask is None


def test_the_loss_has_no_gradient_from_a_forced_end(policy):
    spec = TrainerSpec("test", learning_rate=1e-3)
    end = policy.encode_special(END)
    ids = [*policy.encode_completion("hmmmm"), *end, policy.eos_id]
    said = Completion(policy.decode(ids), tuple(ids), (-0.5,) * len(ids), FinishReason.STOP, 0)
    short = Completion("1", (*policy.encode_completion("1"), policy.eos_id), (-0.5,) * 2,
                       FinishReason.STOP, 0)  # fmt: skip
    told = TrainingGroup("1+1?", (said, short), (1.0, -1.0), True)
    report = GroupTrainer(policy, spec, 10_000).train([told])
    assert report.mask_fraction == pytest.approx(len(end) / (len(ids) + 2))


# --- an engine that is asked in pieces ----------------------------------------------------------


def test_a_server_is_asked_up_to_the_budget_and_then_for_the_rest():
    work = Unfinished((1, 2), 3, 10, 7, thought_max=4)
    (ask,) = work.asks()
    assert (ask.rows, ask.tokens_max) == ((0, 1, 2), 4)
    length, stop = FinishReason.LENGTH, FinishReason.STOP
    pieces = [Piece((5,) * 4, (-1.0,) * 4, length), Piece((6,) * 4, (-1.0,) * 4, length),
              Piece((7,), (-1.0,), stop)]  # fmt: skip
    work.take(ask, pieces, 0)
    assert not work.done
    assert work.spent == [[5] * 4, [6] * 4]
    first, second = work.spent
    work.end_thought(first, Piece((8, 9), (-3.0, -3.0), FinishReason.ABORT), 0)
    work.end_thought(second, None, 0)
    (rest,) = work.asks()
    assert (rest.rows, rest.token_ids, rest.tokens_max) == ((0,), (1, 2, 5, 5, 5, 5, 8, 9), 4)
    work.take(rest, [Piece((3,) * 4, (-1.0,) * 4, length)], 0)
    assert work.done
    ended, cut, short = work.completions(str)
    assert ended.token_ids == (5, 5, 5, 5, 8, 9, 3, 3, 3, 3)
    assert [each.finish_reason for each in (ended, cut, short)] == [length, length, stop]


def test_a_budget_as_long_as_a_completion_changes_nothing():
    work = Unfinished((1,), 1, 4, 7, thought_max=4)
    (ask,) = work.asks()
    work.take(ask, [Piece((5,) * 4, (-1.0,) * 4, FinishReason.LENGTH)], 0)
    assert work.done


# --- rules --------------------------------------------------------------------------------------


def test_a_run_that_does_not_think_keeps_its_id():
    plain = make_run()
    assert make_run(chat={"date": "2026-01-01"}).run_id == plain.run_id
    others = [
        make_run(chat={"date": "2026-01-02"}),
        make_run(chat={"arguments": {"enable_thinking": False}}),
        make_run(thinking={}),
        make_run(thinking={"tokens_max": 5}),
    ]
    assert len({each.run_id for each in [plain, *others]}) == 5
    for each in others:
        assert RunConfig.model_validate_json(each.as_json()).run_id == each.run_id


@pytest.mark.parametrize(
    ("thinking", "said"),
    [({"force_end": True}, "needs thinking.tokens_max"), ({"tokens_max": 64}, "no token for the")],
)
def test_rules_that_leave_no_answer_are_refused(thinking, said):
    with pytest.raises(ConfigError, match=said):
        make_run(thinking=thinking)


def test_arguments_that_no_template_reads_are_told(tmp_path):
    model = qwen_directory(tmp_path)
    (model / "chat_template.jinja").write_text(OPENS + "{% if enable_thinking %}{% endif %}")
    rules = TemplateRules('{"enable_thinking": false}')
    spec = TrainerSpec(str(model), device="cpu", threads=1, template_rules=rules)
    assert not TrainerCore(spec).info().arguments_told
    rules = TemplateRules('{"enable_thinking": false, "enable_thought": true}')
    told = TrainerCore(replace(spec, template_rules=rules)).info().arguments_told
    assert "does not read enable_thought of chat.arguments" in told


def test_a_template_that_opens_a_thought_in_a_run_without_is_told(tmp_path):
    model = qwen_directory(tmp_path)
    spec = TrainerSpec(str(model), device="cpu", threads=1)
    assert not TrainerCore(spec).info().thoughts_told
    (model / "chat_template.jinja").write_text(OPENS)
    assert "opens a thought" in TrainerCore(spec).info().thoughts_told
    assert not TrainerCore(replace(spec, thinking=Thinking())).info().thoughts_told
    assert TrainerSpec.from_record(
        replace(spec, thinking=Thinking("x", 3)).to_record()
    ).thinking == (Thinking("x", 3))
