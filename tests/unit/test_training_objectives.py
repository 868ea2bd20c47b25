"""Losses by name, inside the trainer: what the default does is what it always did."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import losses
from node.methods.choices import chosen_loss
from node.methods.loss_settings import DEFAULT_LOSS, LOSSES, StaleLoss
from node.methods.losses import OBJECTIVES, Tokens, expected
from node.policies.policy import Policy
from node.train import frames
from node.train.rows import weigh
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from tests.unit.training_support import group, open_policy, qwen_directory

SPEC = TrainerSpec(
    "test", learning_rate=0.01, grad_norm_max=1e9, step_guard=False, foreign_weighting="none"
)
MANY = 100_000  # tokens: one micro-batch
STALE = tuple(name for name, kind in LOSSES.items() if issubclass(kind, StaleLoss))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return qwen_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(directory) -> Policy:
    return open_policy(directory)


class FormerTrainer(GroupTrainer):
    """Computes a micro-batch as before there was more than one loss."""

    def _backward(self, batch, sums) -> None:
        rows = [row for unit in batch for row in unit.rows]
        loss = torch.zeros((), device=self.policy.device)
        for row, values in zip(rows, self._forward(batch), strict=True):
            old = values.detach() if row.old_logprobs is None else row.old_logprobs
            advantages = torch.full_like(values, row.advantage)
            each = losses.clipped_surrogate(values, old, advantages, 0.2, 0.28)
            if self.spec.foreign_logprob_min is not None and not row.own:
                each = each.masked_fill(old < self.spec.foreign_logprob_min, 0.0)
            loss = loss + row.weight * each.sum()
            clipped = losses.clipped_tokens(values, old, advantages, 0.2, 0.28)
            sums.clipped += float(clipped.sum())
            sums.tokens += len(row.tokens)
        loss.backward()
        sums.loss += float(loss.detach())


def batch(policy: Policy) -> list[TrainingGroup]:
    return [
        group(policy, "1+1=", ["2", "13", "4"], [1.0, -1.5, 0.5]),
        group(policy, "say something longer:", ["a", "bb", "ccc", ""], [0.5, -1.5, 0.7, 0.3]),
        group(policy, "12/16=", ["3/4", "x"], [1.0, -1.0]),
    ]


def stale(policy: Policy, groups, shift: float, seed: int = 1) -> list[TrainingGroup]:
    """The same groups, as if a policy had generated them whose log-probs differ by so much."""
    found = GroupTrainer(policy, SPEC, MANY).logprobs(groups)
    rng = Random(seed)
    return [
        replace(
            each,
            completions=tuple(
                replace(c, logprobs=tuple(min(v + rng.gauss(0, shift), -1e-4) for v in values))
                for c, values in zip(each.completions, rows, strict=True)
            ),
        )
        for each, rows in zip(groups, found, strict=True)
    ]


def outcome(directory, groups, kind=GroupTrainer, micro_batch_tokens=MANY, **settings):
    """The report of one batch on a fresh policy, and the weights after it."""
    fresh = open_policy(directory)
    trainer = kind(fresh, replace(SPEC, **settings), micro_batch_tokens)
    report = trainer.train(groups)
    return report, torch.cat([p.detach().flatten() for p in fresh.model.parameters()])


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("floor", [None, -5.0])
def test_the_default_loss_is_to_the_bit_what_it_was(directory, policy, updates, floor):
    own, foreign = batch(policy)[:2], [replace(batch(policy)[2], own_tokens=False)]
    groups = stale(policy, own, 0.5, seed=2) + foreign
    settings = {"updates_per_batch": updates, "foreign_logprob_min": floor}
    before, former = outcome(directory, groups, FormerTrainer, **settings)
    after, now = outcome(directory, groups, **settings)
    assert torch.equal(now, former)
    assert (after.loss, after.grad_norm, after.clip_fraction) == (
        before.loss,
        before.grad_norm,
        before.clip_fraction,
    )
    assert (after.unknown_tokens, after.left_out_groups) == (0, 0)
    assert after.behaviour_tokens == sum(len(c.token_ids) for each in own for c in each.completions)
    assert 0.2 < after.mismatch_mean < 0.6  # of a normal distribution with deviation 0.5: 0.4
    assert after.mismatch_max > after.mismatch_mean
    for other in STALE:  # so equal is not what all of them are
        assert not torch.equal(outcome(directory, groups, loss=other, **settings)[1], former)


def test_every_name_has_its_loss_and_its_parameters():
    assert OBJECTIVES.keys() == LOSSES.keys()
    assert DEFAULT_LOSS in LOSSES
    assert not OBJECTIVES[DEFAULT_LOSS].uses_behaviour
    for name, objective in OBJECTIVES.items():
        assert objective.uses_behaviour == issubclass(LOSSES[name], StaleLoss)
        assert LOSSES[name]().kind == name


@pytest.mark.parametrize("name", STALE)
def test_a_loss_depends_on_the_behaviour_and_not_on_how_the_batch_is_cut(directory, policy, name):
    groups = stale(policy, batch(policy), 0.4)
    report, weights = outcome(directory, groups, loss=name)
    for other, tokens in ((groups, 40), (groups[::-1], MANY)):
        again, same = outcome(directory, other, micro_batch_tokens=tokens, loss=name)
        assert again.loss == pytest.approx(report.loss, abs=1e-5)
        assert again.mask_fraction == report.mask_fraction
        assert again.effective_share == pytest.approx(report.effective_share)
        # Adam makes a step of a gradient that is all but zero, whatever its rounding
        assert torch.allclose(weights, same, atol=1e-3)
    other, _ = outcome(directory, stale(policy, batch(policy), 0.4, seed=2), loss=name)
    assert other.loss != pytest.approx(report.loss, abs=1e-3)


def by_completion(tokens: Tokens, counts) -> list[Tokens]:
    columns = (tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages)
    cut = [column.split(counts) for column in columns]
    kept = [None] * len(counts) if tokens.kept is None else tokens.kept.split(counts)
    return [Tokens(*row, keep) for *row, keep in zip(*cut, kept, strict=True)]


@pytest.mark.parametrize("name", STALE)
def test_the_loss_in_the_trainer_is_the_one_of_the_function(directory, policy, name):
    groups = stale(policy, batch(policy), 0.6)
    if name == "aepo":  # entropies are compared within the batch, see below
        name = "aepo, entropy_weight=0"
    objective, set_to = OBJECTIVES[name.partition(",")[0]], chosen_loss(name)
    now, behaviour, compared, advantages, weights = [], [], [], [], []
    found = GroupTrainer(policy, SPEC, MANY).logprobs(groups)
    counts = [len(row) for rows in found for row in rows]
    shares = iter(losses.token_weights(counts, set_to.aggregation))
    for each, rows in zip(groups, found, strict=True):
        of_group = expected([torch.tensor(made.logprobs) for made in each.completions])
        for completion, row, advantage in zip(each.completions, rows, each.advantages, strict=True):
            now += row
            compared += [of_group] * len(row) if objective.by_group else completion.logprobs
            behaviour += completion.logprobs
            advantages += [advantage] * len(row)
            weights += [next(shares)] * len(row)
    columns = [torch.tensor(each) for each in (now, now, compared, advantages)]
    tokens = Tokens(*columns)
    if objective.keep is not None:
        kept = objective.keep(tokens, torch.zeros(len(now), dtype=torch.long), set_to)
        tokens = Tokens(*columns, kept)
    parts = [objective.losses(one, set_to) for one in by_completion(tokens, counts)]
    each, clipped, masked = (torch.cat(column) for column in zip(*parts, strict=True))
    report, _ = outcome(directory, groups, loss=name)
    assert report.loss == pytest.approx(float((each * torch.tensor(weights)).sum()), abs=1e-5)
    assert report.clip_fraction == pytest.approx(float(clipped.float().mean()))
    assert report.mask_fraction == pytest.approx(float(masked.float().mean()))
    logs = [a - b for a, b in zip(now, behaviour, strict=True)]
    assert report.behaviour_tokens == len(logs)
    assert report.mismatch_k1 == pytest.approx(-sum(logs) / len(logs), abs=1e-5)
    assert report.weight_max == pytest.approx(math.exp(max(logs)), rel=1e-4)


def test_m2po_masks_tokens_of_a_batch_that_is_too_far_and_none_of_a_near_one(directory, policy):
    near, _ = outcome(directory, stale(policy, batch(policy), 0.05), loss="m2po")
    far, _ = outcome(directory, stale(policy, batch(policy), 1.0), loss="m2po")
    assert near.mask_fraction == 0.0
    assert far.mask_fraction > 0.1
    assert near.effective_share > far.effective_share
    assert near.mismatch_k3 < far.mismatch_k3


def test_m2po_decides_for_each_source_and_again_before_each_update(directory, policy):
    groups = stale(policy, batch(policy), 0.3)[:1] + stale(policy, batch(policy), 1.5)[1:]
    apart = [replace(each, source=str(place)) for place, each in enumerate(groups)]
    together, _ = outcome(directory, groups, loss="m2po")
    alone, _ = outcome(directory, apart, loss="m2po")
    assert alone.mask_fraction != together.mask_fraction
    masked = sum(
        report.mask_fraction * report.trained_tokens
        for report, _ in (outcome(directory, [each], loss="m2po") for each in groups)
    )
    assert alone.mask_fraction * alone.trained_tokens == pytest.approx(masked)
    near = stale(policy, batch(policy), 0.01)
    assert outcome(directory, near, loss="m2po")[0].mask_fraction == 0.0
    later, _ = outcome(directory, near, loss="m2po", updates_per_batch=6)
    assert later.mask_fraction > 0.0  # by its own steps it went too far


# --- missing behaviour log-probs -------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda logprobs: (),
        lambda logprobs: logprobs[:-1],
        lambda logprobs: (0.0,) * len(logprobs),
        lambda logprobs: (*logprobs[:-1], math.nan),
        lambda logprobs: (*logprobs[:-1], -math.inf),
        lambda logprobs: (*logprobs[:-1], 0.5),
    ],
)
def test_log_probs_that_cannot_be_ones_count_as_unknown(directory, policy, damage):
    groups = stale(policy, batch(policy), 0.4)
    bad = [
        replace(
            each,
            completions=tuple(replace(c, logprobs=damage(c.logprobs)) for c in each.completions),
        )
        for each in groups
    ]
    report, weights = outcome(directory, bad, loss="tis, unknown_share_max=1")
    assert report.unknown_tokens == report.trained_tokens > 0
    assert report.behaviour_tokens == 0
    assert math.isnan(report.effective_share)
    assert torch.equal(weights, outcome(directory, groups)[1])  # weight one: the plain loss
    assert not torch.equal(outcome(directory, groups, loss="tis")[1], weights)


def test_foreign_text_is_of_unknown_behaviour_whatever_it_claims(directory, policy):
    groups = [replace(g, own_tokens=False) for g in stale(policy, batch(policy), 0.4)]
    report, _ = outcome(directory, groups, loss="decoupled, unknown_share_max=1")
    assert report.unknown_tokens == report.trained_tokens > 0


def test_the_share_of_a_batch_without_log_probs_is_capped(directory, policy):
    known = stale(policy, batch(policy), 0.4)
    unknown = batch(policy)  # zeros
    report, weights = outcome(directory, [*known, *unknown], loss="m2po, unknown_share_max=0.25")
    assert report.left_out_groups == 2  # of 9 completions, 3 of 12 may lack them
    assert report.unknown_tokens == sum(len(c.token_ids) for c in unknown[0].completions)
    kept, same = outcome(directory, [*known, unknown[0]], loss="m2po, unknown_share_max=0.25")
    assert torch.equal(weights, same)
    assert kept.left_out_groups == 0
    nothing, _ = outcome(directory, unknown, loss="m2po")
    assert (nothing.left_out_groups, nothing.trained_tokens) == (3, 0)


def test_the_source_travels_to_the_trainer_process(policy):
    groups = [replace(each, source="worker") for each in batch(policy)]
    assert frames.unpack(frames.pack(groups)) == tuple(groups)


# --- settings --------------------------------------------------------------------------------


def test_an_unknown_loss_is_one_line_with_the_known_ones():
    with pytest.raises(
        ConfigError, match="trainer loss = 'ppo': no such method; take one of sapo, "
    ):
        TrainerSpec("m", loss="ppo")


def test_a_parameter_that_the_loss_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="grpo takes no second_moment_max; it takes aggregation"):
        TrainerSpec("m", loss="grpo, second_moment_max=0.1")
    spec = TrainerSpec("m", loss="m2po, second_moment_max=0.1")
    assert chosen_loss(spec.loss) == replace(LOSSES["m2po"](), second_moment_max=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        ("sapo", "clip_low=1"),
        ("sapo", "clip_high=0"),
        ("sapo", "aggregation=sum"),
        ("grpo", "dual_clip=1"),
        ("tis", "behaviour_weight_max=0"),
        ("m2po", "second_moment_max=nan"),
        ("m2po", "unknown_share_max=1.5"),
        ("cispo", "ratio_max=much"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_its_name(loss, wrong):
    with pytest.raises(ConfigError, match=f"': {loss}: {wrong.partition('=')[0]}: Input should"):
        TrainerSpec("m", loss=f"{loss}, {wrong}")


def pull(directory, policy, groups, **settings) -> tuple[float, float]:
    """By the definition, |d loss / d log p| over own tokens and others', of losses in float64."""
    fresh = GroupTrainer(policy, replace(SPEC, **settings), MANY)
    units, _, _ = fresh._prepare(groups)
    rows = [row for unit in units for row in unit.rows]
    weigh(rows, fresh._set_to.aggregation, SPEC.completion_tokens_max)
    sizes = [0.0, 0.0]
    with torch.no_grad():
        found = fresh._forward(units)
    for row, values in zip(rows, found, strict=True):
        values = values.double().requires_grad_()
        each, _, _ = fresh._losses(row, fresh._tokens(row, values))
        (gradient,) = torch.autograd.grad(row.weight * each.sum(), values)
        sizes[not row.own] += float(gradient.abs().sum())
    return sizes[0], sizes[1]


@pytest.mark.parametrize("loss", ["sapo", "topr"])
def test_the_part_of_others_in_what_pulls_is_that_of_the_definition(directory, policy, loss):
    own, foreign = batch(policy)[:2], [replace(batch(policy)[2], own_tokens=False)]
    groups = stale(policy, own, 0.5) + foreign
    settings = {"loss": loss, "foreign_weighting": "none"}
    ours, theirs = pull(directory, policy, groups, **settings)
    for cut in (MANY, 40):
        report, _ = outcome(directory, groups, micro_batch_tokens=cut, **settings)
        assert report.foreign_gradient == pytest.approx(theirs / (ours + theirs), rel=1e-4)
    assert 0.05 < report.foreign_gradient < 0.95
    assert outcome(directory, own, **settings)[0].foreign_gradient == 0.0
    assert outcome(directory, foreign, **settings)[0].foreign_gradient == 1.0
    alike = [replace(each, advantages=(0.0,) * len(each.advantages)) for each in groups]
    assert math.isnan(outcome(directory, alike, **settings)[0].foreign_gradient)


def test_hacpo_takes_the_mean_of_the_sources_own_tokens_where_text_is_encoded_again(
    directory, policy
):
    """The same text in twice as many tokens, whose log-probs add up to as much, is as likely; its
    mean is not."""
    own = stale(policy, batch(policy)[:1], 0.4)
    sent = stale(policy, batch(policy)[1:2], 0.1)[0]
    means = [sum(c.logprobs) / len(c.logprobs) for c in sent.completions]
    claimed = [
        replace(c, token_ids=(3,) * 5, logprobs=(mean - 0.1,) * 5)
        for c, mean in zip(sent.completions, means, strict=True)
    ]
    foreign = replace(sent, completions=tuple(claimed), own_tokens=False, source="peer")
    report, _ = outcome(directory, [*own, foreign], loss="hacpo, aggregation=token_mean")
    assert report.unknown_tokens == 0
    found = GroupTrainer(policy, SPEC, MANY).logprobs([foreign])[0]
    ratios = [
        math.exp(sum(now) / len(now) - mean + 0.1) for now, mean in zip(found, means, strict=True)
    ]
    plain, _ = outcome(directory, own, loss="hacpo")
    counts = [len(now) for now in found]
    whole = sum(counts) + plain.trained_tokens
    wanted = sum(
        -(min(max(s, 0.8), 1.0) ** 2) * a * n
        for s, a, n in zip(ratios, foreign.advantages, counts, strict=True)
    )
    assert any(0.8 < s < 1.0 for s in ratios)
    own_rows = GroupTrainer(policy, SPEC, MANY).logprobs(own)[0]
    total = wanted / whole
    sizes = [len(row) for row in own_rows]
    for row, c, a, n in zip(own_rows, own[0].completions, own[0].advantages, sizes, strict=True):
        s = math.exp((sum(row) - sum(c.logprobs)) / n)
        cut = min(max(s, 1 - 3e-4), 1 + 4e-4)
        total -= min(s * a, cut * a) * n / whole
    assert report.loss == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("cut", [MANY, 40])
def test_aepo_compares_each_tokens_entropy_to_the_whole_batch(directory, policy, cut):
    groups = stale(policy, batch(policy), 0.05)
    entropies, ratios, advantages = [], [], []
    for one in groups:
        prompt = policy.encode_prompt(one.prompt)
        for completion, advantage in zip(one.completions, one.advantages, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logits = policy.model(ids).logits[0, len(prompt) - 1 : -1].double()
            logs = logits.log_softmax(-1)
            entropies += (-(logs.exp() * logs).sum(-1)).tolist()
            now = logs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            ratios += (now - torch.tensor(completion.logprobs)).exp().tolist()
            advantages += [advantage] * len(completion.token_ids)
    mean, count = sum(entropies) / len(entropies), len(entropies)
    spread = math.sqrt(sum((e - mean) ** 2 for e in entropies) / (count - 1))
    wanted = 0.0
    for entropy, ratio, advantage in zip(entropies, ratios, advantages, strict=True):
        told = advantage * (1 + 0.2 * (entropy - mean) / spread)
        clipped = min(max(ratio, 0.8), 1.2)
        wanted -= min(ratio * told, clipped * told) / count
    report, weights = outcome(directory, groups, loss="aepo", micro_batch_tokens=cut)
    assert report.loss == pytest.approx(wanted, abs=1e-5)
    plain, other = outcome(directory, groups, loss="aepo, entropy_weight=0")
    assert abs(plain.loss - report.loss) > 1e-4
    assert not torch.allclose(weights, other, atol=1e-4)
