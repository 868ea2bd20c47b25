"""What others sampled: carried tokens weighed by their log-probs, floors, shares, temperature."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from node.config.load import load_config
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import losses
from node.methods.loss_settings import LOSSES, StaleLoss
from node.policies.policy import Policy
from node.train import frames
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from swarm.rollouts import FinishReason
from tests.unit.tasks_support import make_run
from tests.unit.training_support import group, open_policy, qwen_directory, step_of

SPEC = TrainerSpec("test", grad_norm_max=1e9, step_guard=False, clips_to_median=False)
MANY = 100_000  # tokens: one micro-batch


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    policy = open_policy(qwen_directory(tmp_path_factory.mktemp("model")))
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(4.0)  # so that it finds some tokens likely
    return policy


def update(policy: Policy, groups, spec=SPEC):
    return step_of(policy, groups, spec, MANY)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def likely(policy: Policy, group: TrainingGroup) -> list[list[float]]:
    return GroupTrainer(policy, SPEC, MANY).logprobs([group])[0]


def foreign(policy: Policy, texts, advantages, *, less: float = 0.0) -> TrainingGroup:
    """Of a policy with our tokenizer that found each token e^-less as likely as we do."""
    own = group(policy, "1+1=", texts, advantages)
    return replace(
        own,
        own_tokens=False,
        tokenizer=policy.fingerprint,
        source="peer",
        completions=tuple(
            replace(c, logprobs=tuple(v - less for v in row))
            for c, row in zip(own.completions, likely(policy, own), strict=True)
        ),
    )


def half_likely(policy: Policy) -> str:
    """A text of which some tokens are above the floor and some below."""
    letters = [chr(code) for code in range(32, 127)]
    rows = likely(policy, group(policy, "1+1=", letters, [1.0] * len(letters)))
    first = [row[0] for row in rows]
    return letters[first.index(max(first))] + letters[first.index(min(first))]


# --- carried tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("less", "weight"),
    [(0.0, 1.0), (math.log(1.5), 1.5), (-math.log(4.0), 0.25), (math.log(7.0), 2.0)],
)
def test_a_carried_token_counts_by_its_truncated_ratio(policy, less, weight):
    """All tokens alike: w = pi / mu = e^less, at most 2. With one update the ratio is 1, so that
    the loss of a batch is -w times the mean of A over tokens, by hand: -w (2 * 1 + 0) / 2."""
    sent = foreign(policy, ["2"], [1.0], less=less)
    report, gradient = update(policy, [sent])
    _, plain = update(policy, [group(policy, "1+1=", ["2"], [1.0])])
    assert report.loss == pytest.approx(-weight, rel=1e-4)
    assert close(gradient, weight * plain)
    assert report.weighted_tokens == 2
    assert report.behaviour_tokens == 0  # of others nothing enters the mismatch with our own engine


@pytest.mark.parametrize(
    "damage",
    [
        lambda g, c: (replace(g, tokenizer="another"), c),
        lambda g, c: (g, replace(c, logprobs=(0.0,) * len(c.logprobs))),
        lambda g, c: (g, replace(c, logprobs=c.logprobs[:-1])),
        lambda g, c: (g, replace(c, text="3")),
        lambda g, c: (g, replace(c, token_ids=(*c.token_ids[:-1], 100_000))),
        lambda g, c: (g, replace(c, finish_reason=FinishReason.LENGTH)),
    ],
)
def test_what_cannot_be_trusted_is_trained_on_by_its_text(policy, damage):
    sent = foreign(policy, ["2"], [1.0], less=math.log(1.5))
    changed, completion = damage(sent, sent.completions[0])
    changed = replace(changed, completions=(completion,))
    report, gradient = update(policy, [changed])
    assert report.weighted_tokens == 0
    by_text = replace(changed, tokenizer="")
    assert torch.equal(gradient, update(policy, [by_text])[1])
    assert update(policy, [sent])[0].weighted_tokens == 2


def test_tokens_padded_with_special_ones_are_not_carried(policy):
    """Neither where the text leaves them out, nor where it spells them out."""
    sent = foreign(policy, ["2"], [1.0])
    [completion] = sent.completions
    bos = policy.tokenizer.bos_token_id
    padded = replace(
        completion,
        token_ids=(bos, bos, *completion.token_ids),
        logprobs=(-1.0, -1.0, *completion.logprobs),
    )
    spelled = policy.decode(list(padded.token_ids))
    assert spelled != completion.text
    for text in (completion.text, spelled):
        said = replace(padded, text=text)
        plain = replace(sent, completions=(said,), tokenizer="")
        for own_tokens in (False, True):  # also of a worker whose tokenizer is ours
            changed = replace(sent, completions=(said,), own_tokens=own_tokens)
            report, gradient = update(policy, [changed])
            assert report.trained_tokens == len(policy.encode_completion(text)) + 1
            assert report.weighted_tokens == 0
            assert close(gradient, update(policy, [plain])[1])


def test_a_loss_that_corrects_takes_carried_log_probs_itself(policy):
    sent = foreign(policy, ["2"], [1.0], less=math.log(1.5))
    for name, weight in (("tis", 1.5), ("decoupled", 1.5), ("dapo", 1.28), ("sapo", 1.5)):
        report, _ = update(policy, [sent], replace(SPEC, loss=name))
        assert report.loss == pytest.approx(-weight, rel=1e-4), name
        assert (report.unknown_tokens, report.left_out_groups) == (0, 0)


# --- without log-probs to trust ------------------------------------------------------------------


def test_of_unknown_negatives_only_likely_tokens_are_made_less_likely(policy):
    texts = ["14", half_likely(policy)]
    sent = replace(foreign(policy, texts, [1.0, -1.0]), tokenizer="")
    good, bad = likely(policy, sent)
    low = [value < -4.0 for value in bad]
    assert 0 < sum(low) < len(low)
    report, gradient = update(policy, [sent])
    assert report.unlikely_tokens == sum(low)
    total = len(good) + len(bad)
    assert report.loss == pytest.approx((-len(good) + len(bad) - sum(low)) / total, abs=1e-5)
    assert not close(gradient, update(policy, [sent], replace(SPEC, foreign_weighting="none"))[1])
    own = group(policy, "1+1=", texts, [1.0, -1.0])
    assert update(policy, [own])[0].unlikely_tokens == 0


def test_a_made_up_log_prob_does_not_get_an_unlikely_token_punished(policy):
    sent = foreign(policy, [half_likely(policy)], [-1.0], less=30.0)  # "sampled" where nobody would
    report, _ = update(policy, [sent])
    low = sum(value < -4.0 for value in likely(policy, sent)[0])
    assert (report.weighted_tokens, report.unlikely_tokens) == (3, low)
    assert report.loss == pytest.approx(2.0 * (3 - low) / 3, rel=1e-4)


def test_positives_alone(policy):
    sent = foreign(policy, ["2", "13", "4"], [1.0, -0.4, -0.6])
    own = group(policy, "2+2=", ["4", "5"], [1.0, -1.0])
    report, gradient = update(policy, [own, sent], replace(SPEC, foreign_weighting="positives"))
    good = replace(sent, completions=sent.completions[:1], advantages=(1.0,), tokenizer="")
    assert torch.equal(gradient, update(policy, [own, good])[1])
    assert (report.left_out_completions, report.weighted_tokens) == (2, 0)


def test_a_strange_weighting_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"foreign.weighting"):
        load_config({"foreign_weighting": "some"}, {})


def test_the_tokenizer_travels_to_the_trainer_process(policy):
    groups = [foreign(policy, ["2"], [1.0])]
    assert frames.unpack(frames.pack(groups)) == tuple(groups)


# --- what is left out, and what then stays --------------------------------------------------------


def test_where_a_long_right_answer_is_left_out_the_others_are_not_all_wrong(policy):
    long = group(policy, "1+1=", ["9" * 200, "2", "3"], [2.0, -1.0, -1.0])
    report, gradient = update(policy, [long])
    assert report.skipped_completions == 1
    assert not gradient.any()
    assert report.trained_tokens == 0


def test_groups_without_advantage_count_in_the_share_that_may_lack_log_probs(policy):
    """Where the policy fails at all of its own tasks it has nothing but the others' groups."""
    idle = replace(foreign(policy, ["2", "3"], [0.0, 0.0]), own_tokens=True)
    sent = group(policy, "5+5=", ["10", "11"], [1.0, -1.0], own=False)
    for name, its in LOSSES.items():
        if issubclass(its, StaleLoss) and its().unknown_share_max < 1:
            report, gradient = update(policy, [idle, sent], replace(SPEC, loss=name))
            assert (report.left_out_groups, report.trained_tokens) == (0, 6), name
            assert gradient.any()
            assert report.unknown_tokens == 6
            alone, _ = update(policy, [sent], replace(SPEC, loss=name))
            assert (alone.left_out_groups, alone.trained_tokens) == (1, 0)


# --- temperature ----------------------------------------------------------------------------------


def test_losses_are_of_the_distribution_that_the_run_samples_from(policy):
    """Fresh tokens of an engine at temperature 1.3 have a ratio of exactly one."""
    own = group(policy, "1+1=", ["2", "13"], [1.0, -1.0])
    prompt = policy.encode_prompt(own.prompt)
    completions = []
    for completion in own.completions:
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(prompt) - 1 : -1]
        tempered = losses.token_logprobs(logits / 1.3, torch.tensor(completion.token_ids))
        completions.append(replace(completion, logprobs=tuple(tempered.tolist())))
    fresh = replace(own, completions=tuple(completions))
    at = replace(SPEC, loss="grpo", temperature=1.3)
    report, gradient = update(policy, [fresh], at)
    assert report.mismatch_max == pytest.approx(0.0, abs=1e-4)
    assert report.clip_fraction == 0.0
    plain, other = update(policy, [fresh], replace(at, temperature=1.0))
    assert plain.mismatch_max > 0.05
    assert not close(gradient, other)


def test_a_temperature_out_of_range_is_refused():
    with pytest.raises(ValidationError, match="temperature"):
        make_run(sampling={"temperature": 0.0})
