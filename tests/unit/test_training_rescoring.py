"""Log-probs of tokens that others sampled: of the very ids, under the loaded weights."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.interfaces.engine import Sampling, plain_requests
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import losses
from node.run.claims import ClaimedToken, fault_of, fit_of
from node.train.trainer_worker import TrainerCore
from swarm.errors import LocalProtocolError
from swarm.rollouts import Author, Completion, FinishReason, Turn
from tests.unit.training_support import gpt2_directory, qwen_directory, reference_logprobs

SAMPLING = Sampling(max_new_tokens=10)
PROMPTS = ("1+1=", "say something longer:")
EACH = 4
VOCABULARY = 1_000_000  # more than any of the models has


@pytest.fixture(params=[qwen_directory, gpt2_directory])
def core(request, tmp_path) -> TrainerCore:
    return TrainerCore(TrainerSpec(str(request.param(tmp_path)), device="cpu", threads=1))


def sampled(core: TrainerCore) -> list[TrainingGroup]:
    core.begin(1, "requests", plain_requests(PROMPTS, EACH), SAMPLING, 5)
    groups = core.advance(1, SAMPLING.max_new_tokens)
    assert groups is not None
    return [
        TrainingGroup(prompt, group.completions, (0.0,) * EACH, own_tokens=True)
        for prompt, group in zip(PROMPTS, groups, strict=True)
    ]


def with_first(group: TrainingGroup, **changes: object) -> TrainingGroup:
    first, *others = group.completions
    return replace(group, completions=(replace(first, **changes), *others))


def test_scores_are_those_of_the_definition(core):
    groups = sampled(core)
    for group, rows in zip(groups, core.score(groups), strict=True):
        for completion, row in zip(group.completions, rows, strict=True):
            expected = reference_logprobs(core.policy, group.prompt, completion, SAMPLING)
            count = len(completion.token_ids)
            assert row[:count] == pytest.approx(expected, abs=1e-4)
            assert row[:count] == pytest.approx(completion.logprobs, abs=1e-4)
            assert len(row) == 3 * count


CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }};{% endfor %}bot:"


@pytest.mark.parametrize("template", ["", CHAT])
def test_the_log_probs_of_a_question_are_those_within_its_prompt(tmp_path, template):
    """Against one plain pass in float64 over the rendered prompt."""
    directory = qwen_directory(tmp_path)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    core = TrainerCore(TrainerSpec(str(directory), device="cpu", threads=1))
    prompts = ["12+34=", Prompt.of("say: é", system="Be brief.").text]
    plain, accented = core.prompt_logprobs(prompts)
    assert plain[0] == list("12+34=")
    ids = core.policy.encode_prompt(prompts[0])
    asked = [token for each in "12+34=" for token in core.policy.encode_completion(each)]
    begin = next(at for at in range(len(ids)) if ids[at : at + 6] == asked)
    with torch.no_grad():
        logits = copy.deepcopy(core.policy.model).double()(torch.tensor([ids])).logits[0]
    told = logits.log_softmax(-1)
    expected = [float(told[at - 1, ids[at]]) if at else 0.0 for at in range(begin, begin + 6)]
    assert plain[1] == pytest.approx(expected, abs=1e-4)
    # the two bytes of a letter are no text each, and without a template the system's text is joined
    assert accented == ([], [])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_scores_are_at_the_temperature_of_the_run(tmp_path, temperature):
    """An engine's log-probs are those of the scorer, and of samples in the mean; scored at another
    temperature they are not."""
    sampling = replace(SAMPLING, temperature=temperature)
    model = str(qwen_directory(tmp_path))
    spec = TrainerSpec(model, device="cpu", threads=1, temperature=temperature)
    core = TrainerCore(spec)
    core.begin(1, "requests", plain_requests(PROMPTS, 16), sampling, 5)
    made = core.advance(1, sampling.max_new_tokens)
    assert made is not None
    groups = [
        TrainingGroup(prompt, group.completions, (0.0,) * 16, own_tokens=True)
        for prompt, group in zip(PROMPTS, made, strict=True)
    ]
    plain = TrainerCore(replace(spec, temperature=1.0))
    for scorer, fits in ((core, True), (plain, False)):
        tokens = [
            ClaimedToken(completion.logprobs[at], row[at], row[count + at], row[2 * count + at])
            for group, rows in zip(groups, scorer.score(groups), strict=True)
            for completion, row in zip(group.completions, rows, strict=True)
            for count in [len(completion.token_ids)]
            for at in range(count)
        ]
        assert (fault_of(fit_of(tokens), temperature) is None) is fits


def test_means_and_variances_are_those_of_samples():
    logits = torch.tensor([[0.3, -1.2, 2.0, -math.inf], [0.0, 0.0, 0.0, 0.0]])
    [first, even] = losses.token_moments(logits, torch.tensor([2, 1])).tolist()
    weights = [math.exp(0.3), math.exp(-1.2), math.exp(2.0)]
    probs = [weight / sum(weights) for weight in weights]
    mean = sum(p * math.log(p) for p in probs)
    variance = sum(p * (math.log(p) - mean) ** 2 for p in probs)
    assert first == pytest.approx([math.log(probs[2]), mean, variance], abs=1e-5)
    assert even == pytest.approx([-math.log(4), -math.log(4), 0.0], abs=1e-6)


def reading(core: TrainerCore, group: TrainingGroup, ids: tuple[int, ...]) -> TrainingGroup:
    """The group whose first completion has these tokens, and their text."""
    text = core.policy.decode(list(ids)) if max(ids, default=0) < VOCABULARY else "none"
    return with_first(group, token_ids=ids, text=text, logprobs=(-1.0,) * len(ids))


def test_ids_are_scored_as_they_are(core):
    groups = sampled(core)
    expected = core.score(groups)
    ids = groups[0].completions[0].token_ids
    other = reading(core, groups[0], ((ids[0] + 1) % 90, *ids[1:]))
    assert core.score([other])[0][0] != pytest.approx(expected[0][0], abs=1e-2)
    with pytest.raises(LocalProtocolError, match="own tokenizer"):
        core.score([groups[0], replace(groups[1], own_tokens=False)])


def test_a_text_is_that_of_its_tokens(core):
    group = sampled(core)[0]
    [expected] = core.score([group])
    first, *others = core.score([with_first(group, text="a better answer")])[0]
    count = len(group.completions[0].token_ids)
    assert first == [-math.inf] * count + [0.0] * (2 * count)
    for row, plain in zip(others, expected[1:], strict=True):
        assert row == pytest.approx(plain, abs=1e-4)


def test_a_transcript_is_scored_by_the_policy_s_turns_after_what_was_said_between(core):
    policy = core.policy
    turns = [[*policy.encode_completion(text), policy.eos_id] for text in ("left", "up")]
    ids = [token for turn in turns for token in turn]
    segments = (
        Turn(Author.POLICY, 4, len(turns[0])),
        Turn(Author.ENVIRONMENT, 4, 0),
        Turn(Author.POLICY, 2, len(turns[1])),
    )
    honest = Completion(
        "leftwallup", tuple(ids), (-1.0,) * len(ids), FinishReason.STOP, 0, segments=segments
    )

    def scored(*completions: Completion) -> list[list[float]]:
        group = TrainingGroup(PROMPTS[0], completions, (0.0,) * len(completions), own_tokens=True)
        return core.score([group])[0]

    (found,) = scored(honest)
    before = policy.encode_prompt(PROMPTS[0])
    sequence = [*before, *turns[0], *policy.between_turns("wall"), *turns[1]]
    at = [*range(len(before), len(before) + len(turns[0]))]
    at += range(len(sequence) - len(turns[1]), len(sequence))
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([sequence])).logits[0].double()
    said = logits.log_softmax(-1)
    expected = [float(said[place - 1, sequence[place]]) for place in at]
    assert found[: len(ids)] == pytest.approx(expected, abs=1e-4)

    other_text = replace(honest, text="lostwallup")
    moved = replace(
        honest,
        segments=(replace(segments[0], tokens=1), *segments[1:2],
                  replace(segments[2], tokens=len(ids) - 1)),
    )  # fmt: skip
    no_end = replace(honest, token_ids=(*ids[: len(turns[0]) - 1], ids[0], *ids[len(turns[0]) :]))
    for forged in (other_text, moved, no_end):
        (column, good) = scored(forged, honest)
        assert set(column[: len(ids)]) == {-math.inf}
        assert good == found


def test_the_loaded_version_is_the_one_that_scores(tmp_path):
    first, second = qwen_directory(tmp_path / "a"), qwen_directory(tmp_path / "b", seed=4)
    core = TrainerCore(TrainerSpec(str(first), device="cpu", threads=1))
    groups = sampled(core)
    own = core.score(groups)
    core.load(second, 8)
    assert core.score(groups)[0][0] != pytest.approx(own[0][0], abs=1e-2)
    core.load(Path(first), 0)
    assert core.score(groups) == own


def test_what_cannot_be_scored_leaves_the_others_alone(core):
    group = sampled(core)[0]
    [expected] = core.score([group])
    too_long = (5,) * core.policy.context_tokens
    for ids, score in (
        ((), []),
        (too_long, []),
        ((5, VOCABULARY, 5), [-math.inf] * 3 + [0.0] * 6),
    ):
        odd = reading(core, group, ids)
        first, *others = core.score([odd])[0]
        assert first == score
        for row, plain in zip(others, expected[1:], strict=True):
            assert row == pytest.approx(plain, abs=1e-4)


def test_large_groups_are_scored_in_pieces(core):
    groups = sampled(core)
    expected = core.score(groups)
    passes = []
    forward = core.trainer._forward
    core.trainer._forward = lambda *given: (passes.append(1), forward(*given))[1]
    core.trainer.micro_batch_tokens = 1
    for rows, whole in zip(core.score(groups), expected, strict=True):
        for row, plain in zip(rows, whole, strict=True):
            assert row == pytest.approx(plain, abs=1e-4)
    assert len(passes) == len(PROMPTS) * EACH


def test_who_only_samples_and_scores_has_no_optimizer_state(core):
    groups = sampled(core)
    core.score(groups)
    core.load(Path(core.spec.model), 3)
    assert not core.trainer.optimizer.state
    completions: tuple[Completion, ...] = groups[0].completions
    core.train([replace(groups[0], completions=completions, advantages=(1.0, -1.0, 0.5, -0.5))])
    assert core.trainer.optimizer.state
