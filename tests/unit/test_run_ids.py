"""One id for equal rules, another for any other, and no two that a search would find."""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from node.config import RunConfig
from node.config.run import RUN_ID, canonical_json
from node.hosting.run_data import _checked
from swarm.errors import ConfigError
from swarm.wire.messages import RUN_ID_CHARS_MAX
from tests.unit.tasks_support import ALICE, BOB

SUM = {"name": "scripted_sum"}
EXAMPLE = {"question": "1+1=", "completion": "2"}
LEARNER = {"peer": ALICE}
PLAIN: dict[str, Any] = {"name": "test", "environments": [SUM]}
# Of every field of the rules: where it is another, and what else must be said for that.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "name": ({"name": "other"}, {}),
    "environments.name": ({"environments": [{"name": "bf"}]}, {}),
    "environments.weight": ({"environments": [SUM | {"weight": 2}]}, {}),
    "environments.parameters": ({"environments": [SUM | {"parameters": {"max": 8}}]}, {}),
    "environments.answer.format": ({"environments": [SUM | {"answer": {"format": "tags"}}]}, {}),
    "environments.answer.format_reward": (
        {"environments": [SUM | {"answer": {"format_reward": 0.1}}]},
        {},
    ),
    "environments.answer.system": ({"environments": [SUM | {"answer": {"system": "Add."}}]}, {}),
    "environments.answer.examples": (
        {"environments": [SUM | {"answer": {"examples": [EXAMPLE]}}]},
        {},
    ),
    "sampling.temperature": ({"sampling": {"temperature": 0.9}}, {}),
    "sampling.top_p": ({"sampling": {"top_p": 0.9}}, {}),
    "sampling.max_new_tokens": ({"sampling": {"max_new_tokens": 65}}, {}),
    "limits.group_size_max": ({"limits": {"group_size_max": 8}}, {}),
    "limits.record_life_s": ({"limits": {"record_life_s": 60}}, {}),
    "limits.clock_skew_s": ({"limits": {"clock_skew_s": 60}}, {}),
    "limits.prompt_chars_max": ({"limits": {"prompt_chars_max": 60}}, {}),
    "limits.text_chars_max": ({"limits": {"text_chars_max": 60}}, {}),
    "held_out.tasks": ({"held_out": {"tasks": 60}}, {}),
    "held_out.greedy": ({"held_out": {"greedy": True}}, {}),
    "training.loss": ({"training": {"loss": "dapo"}}, {}),
    "models": ({"models": ["tiny"]}, {}),
    "reward": ({"reward": "partial"}, {}),
    "publishers": ({"publishers": [ALICE]}, {}),
    "learner.peer": ({"learner": {"peer": BOB}}, {"learner": LEARNER}),
    "learner.model": ({"learner": LEARNER | {"model": "m"}}, {"learner": LEARNER}),
    "learner.staleness_max": ({"learner": LEARNER | {"staleness_max": 5}}, {"learner": LEARNER}),
    "learner.publish_every_steps": (
        {"learner": LEARNER | {"publish_every_steps": 2}}, {"learner": LEARNER},
    ),
    "learner.groups_per_step": (
        {"learner": LEARNER | {"groups_per_step": 8}}, {"learner": LEARNER},
    ),
    "learner.group_size": ({"learner": LEARNER | {"group_size": 4}}, {"learner": LEARNER}),
    "learner.lease_life_s": ({"learner": LEARNER | {"lease_life_s": 60}}, {"learner": LEARNER}),
    "learner.pool_groups_per_step": (
        {"learner": LEARNER | {"pool_groups_per_step": 1}}, {"learner": LEARNER},
    ),
    "learner.rescored_share": (
        {"learner": LEARNER | {"rescored_share": 0.2}}, {"learner": LEARNER},
    ),
    "answer.format": ({"answer": {"format": "tags"}}, {}),
    "answer.format_reward": ({"answer": {"format_reward": 0.1}}, {}),
    "answer.system": ({"answer": {"system": "Add."}}, {}),
    "answer.examples": ({"answer": {"examples": [EXAMPLE]}}, {}),
    "chat.arguments": ({"chat": {"arguments": {"enable_thinking": False}}}, {}),
    "chat.date": ({"chat": {"date": "2026-01-02"}}, {}),
    "thinking.end": ({"thinking": {"end": "</thought>"}}, {"thinking": {}}),
    "thinking.tokens_max": ({"thinking": {"tokens_max": 9}}, {"thinking": {}}),
    "thinking.force_end": (
        {"thinking": {"tokens_max": 8, "force_end": True}}, {"thinking": {"tokens_max": 8}},
    ),
    "common.share": ({"common": {"share": 0.5}}, {}),
    "common.tasks": ({"common": {"share": 0.5, "tasks": 9}}, {"common": {"share": 0.5}}),
}  # fmt: skip
NOT_CHANGED = {"environments.version"}  # what is installed decides it


def run_of(*changes: dict[str, Any]) -> RunConfig:
    rules = PLAIN
    for each in changes:
        rules = rules | each
    return RunConfig.model_validate(rules)


def fields_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = inner_model(field.annotation)
        if inner is None or name == "examples":
            yield f"{above}{name}"
        else:
            yield from fields_of(inner, f"{above}{name}.")


def inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (inner_model(each) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)


def test_an_id_has_128_bits_and_room_for_the_longest_name() -> None:
    run_id = run_of({"name": "x" * 40}).run_id
    assert re.fullmatch("x{40}-[0-9a-f]{32}", run_id)
    assert RUN_ID.fullmatch(run_id)
    assert len(run_id) <= RUN_ID_CHARS_MAX


def test_every_field_of_the_rules_is_in_the_id() -> None:
    assert set(fields_of(RunConfig)) == CHANGES.keys() | NOT_CHANGED
    ids = {run_of().run_id}
    for name, (changed, beside) in CHANGES.items():
        assert run_of(changed).run_id != run_of(beside).run_id, name
        ids.add(run_of(changed).run_id)
    assert len(ids) == len(CHANGES) + 1
    for loss, parameter in (("tis", "behaviour_weight_max=4"), ("sapo", "clip_low=0.1")):
        plain, changed = ({"training": {"loss": text}} for text in (loss, f"{loss}, {parameter}"))
        assert run_of(plain).run_id != run_of(changed).run_id


@pytest.mark.parametrize(
    ("spellings", "others"),
    [
        (["1", "1.0", "1e0", "10e-1", "1.000000000000000000000001"], ["1.1", "2"]),
        (["0", "0.0", "-0.0", "0e9", "1e-999"], ["1", "5e-324"]),
        (["1e22", "10000000000000000000000", "1e+22"], ["10000000000000000000001", "1e23"]),
        (["0.1", "1e-1", "0.10", "0.1000000000000000000000001"], ["0.10000000000000002"]),
    ],
)
def test_a_number_has_one_spelling_and_another_is_another_run(
    spellings: list[str], others: list[str]
) -> None:
    def ids(numbers: list[str]) -> set[str]:
        texts = [f'{{"max":[{{"a":{number}}}]}}' for number in numbers]
        return {run_of({"environments": [SUM | {"parameters": text}]}).run_id for text in texts}

    assert len(ids(spellings)) == 1
    assert len(ids([*spellings, *others])) == 1 + len(others)
    weights = {run_of({"environments": [SUM | {"weight": each}]}).run_id for each in (2, 2.0)}
    assert len(weights) == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_finite_number_is_refused(number: str) -> None:
    text = f'{{"name": "test", "environments": [{{"name": "scripted_sum", "weight": {number}}}]}}'
    with pytest.raises((ConfigError, ValueError)):
        RunConfig.model_validate(json.loads(text))
    with pytest.raises(ValueError, match="may hold only numbers"):
        run_of({"environments": [SUM | {"parameters": f'{{"max":{number}}}'}]})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


def typed(value: Any) -> Any:
    """The same, with `True` told from 1."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value]
    return (isinstance(value, bool), value)


@given(plain, plain)
def test_equal_values_and_no_others_have_one_text(one: Any, other: Any) -> None:
    text = canonical_json(one)
    assert typed(json.loads(text)) == typed(one)
    assert canonical_json(json.loads(text)) == text
    assert (text == canonical_json(other)) == (typed(one) == typed(other))


def test_rules_of_another_id_are_refused() -> None:
    run = run_of()
    assert _checked(run.as_json(), run.run_id, lambda question: False).run_id == run.run_id
    for changed, _ in CHANGES.values():
        with pytest.raises(ConfigError, match="the peer sent the rules of"):
            _checked(run_of(changed).as_json(), run.run_id, lambda question: True)
    short = run.run_id[: -len("0" * 20)]
    with pytest.raises(ConfigError):
        _checked(run.as_json(), short, lambda question: True)
