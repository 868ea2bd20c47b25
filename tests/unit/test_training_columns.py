"""A group's own entries for each completion and token: weights, token advantages, masks; and the
hidden states that the trainer reads."""

from dataclasses import replace

import pytest
import torch
import trio

from node.interfaces.trainer import TrainingGroup, training_group
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy
from node.train import frames
from node.train.process import InProcessTrainer
from node.train.trainer import GroupTrainer
from swarm.errors import LocalProtocolError
from tests.unit.training_support import (
    gpt2_directory,
    group,
    mamba_directory,
    open_policy,
    qwen_directory,
    step_of,
)

SPEC = TrainerSpec("test", grad_norm_max=1e9, step_guard=False, clips_to_median=False)
MANY = 100_000  # tokens: one micro-batch


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return qwen_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(directory) -> Policy:
    return open_policy(directory)


def two(policy: Policy) -> list[TrainingGroup]:
    return [
        group(policy, "1+1=", ["2", "13", "4"], [1.0, -1.5, 0.5]),
        group(policy, "12/16=", ["3/4", "x"], [1.0, -1.0]),
    ]


def exact(policy: Policy, groups: list[TrainingGroup]) -> torch.Tensor:
    """The gradient by the definition in float64: -(1 / all tokens) sum w_i m_t A_t grad log p_t."""
    model = policy.model.double()
    total = sum(len(c.token_ids) for g in groups for c in g.completions)
    loss = torch.zeros((), dtype=torch.float64)
    for one in groups:
        prompt = policy.encode_prompt(one.prompt)
        for place, completion in enumerate(one.completions):
            count = len(completion.token_ids)
            logs = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0].log_softmax(-1)
            told = one.token_advantages[place] if one.token_advantages else ()
            mask = one.masks[place] if one.masks else ()
            weight = one.weights[place] if one.weights else 1.0
            for at, token in enumerate(completion.token_ids):
                advantage = told[at] if told else one.advantages[place]
                kept = mask[at] if mask else True
                loss -= weight * kept * advantage * logs[len(prompt) - 1 + at, token] / total
            assert not told or len(told) == count
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).float()
    model.zero_grad()
    model.float()
    return gradient


COLUMNS = [
    {"weights": (2.0, 0.25, 1.0)},
    {"token_advantages": ((2.0, -1.0), (), (1.0, -1.0))},  # the last has a mean of zero
    {"masks": ((True, False), (False, True, True), ())},
    {
        "weights": (2.0, 0.25, 1.0),
        "token_advantages": ((), (1.0, 0.0, -3.0), ()),
        "masks": ((False, True), (), (True, True)),
    },
]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("tokens", [MANY, 8])
def test_entries_make_the_gradient_of_the_definition(policy, columns, tokens):
    plain = two(policy)
    groups = [replace(plain[0], **columns), plain[1]]
    report, gradient = step_of(policy, groups, SPEC, tokens)
    wanted = exact(policy, groups)
    assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(gradient, exact(policy, plain), rtol=1e-2, atol=1e-4)
    masked = sum(not kept for mask in columns.get("masks", ()) for kept in mask)
    assert report.mask_fraction == pytest.approx(masked / report.trained_tokens)


def test_empty_entries_change_no_bit(policy):
    plain = two(policy)
    empty = [replace(g, token_advantages=((),) * 3, masks=((),) * 3) for g in plain[:1]]
    report, gradient = step_of(policy, [*empty, plain[1]], SPEC)
    before, same = step_of(policy, plain, SPEC)
    assert torch.equal(gradient, same)
    assert report.loss == before.loss


def test_text_of_other_tokens_takes_the_mean_and_no_mask(policy):
    sent = group(policy, "1+1=", ["2", "13"], [0.0, 0.0], own=False)
    other = [replace(c, token_ids=(*c.token_ids, 1), logprobs=()) for c in sent.completions]
    told = replace(
        sent,
        completions=tuple(other),
        token_advantages=((3.0, 0.0, 0.0), (0.0, 0.0, -4.0, 0.0)),
        masks=((False,) * 3, (True,) * 4),
        weights=(0.5, 1.0),
    )
    wanted = replace(sent, advantages=(0.5, -1.0))
    assert torch.allclose(step_of(policy, [told], SPEC)[1], step_of(policy, [wanted], SPEC)[1])


def test_left_out_completions_take_their_entries_along(policy):
    whole = two(policy)[0]
    found = training_group(
        whole.prompt,
        whole.completions,
        [1.0, None, -1.0],
        own_tokens=True,
        weights=(1.0, 2.0, 3.0),
        token_advantages=((), (1.0,) * 3, (1.0, 2.0)),
        masks=((True, False), (), ()),
    )
    assert found.weights == (1.0, 3.0)
    assert found.token_advantages == ((), (1.0, 2.0))
    assert found.masks == ((True, False), ())
    assert frames.unpack(frames.pack([found])) == (found,)


@pytest.mark.parametrize(
    "columns",
    [{"weights": (1.0,)}, {"masks": ((True,),) * 3}, {"token_advantages": ((), ())}],
)
def test_entries_of_a_wrong_number_are_refused(policy, columns):
    with pytest.raises(LocalProtocolError, match=r"not one (weight|entry) for each"):
        replace(two(policy)[0], **columns)


@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory, mamba_directory])
def test_features_are_the_last_tokens_states(make, tmp_path):
    directory = make(tmp_path)
    policy = open_policy(directory)
    groups = two(policy)
    long = group(policy, "1+1=", ["9" * 200, "3"], [1.0, -1.0])
    trainer = InProcessTrainer(replace(SPEC, model=str(directory), device="cpu"))
    found = trio.run(trainer.features, [*groups, long])
    for one, rows in zip(groups, found, strict=False):
        for completion, row in zip(one.completions, rows, strict=True):
            ids = torch.tensor([[*policy.encode_prompt(one.prompt), *completion.token_ids]])
            with torch.no_grad():
                states = policy.model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
            assert row == pytest.approx(states.tolist(), abs=1e-5)
    assert len(set(found[0])) == 3
    too_long = not policy.stateful
    assert (found[2][0] == ()) is too_long
    assert found[2][1]
    report = GroupTrainer(policy, SPEC, MANY).train(groups)
    assert report.trained_tokens > 0


# --- guidance and teachers ------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["sapo", "grpo, unknown_share_max=1, aggregation=token_mean"])
def test_guidance_with_a_weight_is_learned_whatever_its_advantage(policy, loss):
    """As tokens with that weight for an advantage, without a ratio."""
    spec = replace(SPEC, loss=loss)
    own, other = two(policy)
    taught = group(policy, "5+5=", ["10", "9"], [0.0, 0.0])
    guided = replace(taught, guided=1, guided_weight=0.7)
    wanted = replace(taught, advantages=(0.0, 0.7))
    report, gradient = step_of(policy, [own, other, guided], spec)
    assert torch.allclose(gradient, exact(policy, [own, other, wanted]), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(gradient, exact(policy, [own, other, taught]), rtol=1e-2, atol=1e-4)
    assert report.trained_tokens == sum(
        len(c.token_ids) for g in (own, other, guided) for c in g.completions
    )
    _, shaped = step_of(policy, [own, other, replace(guided, shaping=0.1)], spec)
    assert torch.equal(shaped, gradient)  # the weight comes first
    plain = replace(wanted, guided=1, shaping=0.1)
    assert not torch.allclose(step_of(policy, [own, other, plain], spec)[1], gradient, atol=1e-4)


@pytest.mark.parametrize("tokens", [MANY, 8])
def test_a_teacher_teaches_each_token_where_it_has_a_weight(policy, tokens):
    own, other = two(policy)
    behaviour = ((-1.0, -2.0), (-3.0, -0.5, -1.0), (-2.0, -2.0))
    teacher = ((-0.5, -2.5), (-2.0, -2.0, -2.0), ())
    made = [replace(c, logprobs=b) for c, b in zip(own.completions, behaviour, strict=True)]
    told = replace(own, completions=tuple(made), advantages=(0.0,) * 3, teacher_logprobs=teacher)
    spec = replace(SPEC, teacher_weight=0.5)
    wanted = replace(
        told, token_advantages=((0.25, -0.25), (0.5, -0.75, -0.5), (0.0, 0.0)), teacher_logprobs=()
    )
    _, gradient = step_of(policy, [told, other], spec, tokens)
    assert torch.allclose(gradient, exact(policy, [wanted, other]), rtol=1e-4, atol=1e-6)
    _, without = step_of(policy, [told, other], SPEC, tokens)
    assert torch.equal(
        without, step_of(policy, [replace(told, teacher_logprobs=()), other], SPEC, tokens)[1]
    )
    assert not torch.allclose(without, gradient, atol=1e-4)
