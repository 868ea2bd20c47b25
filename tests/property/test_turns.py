"""Whatever somebody says was said, a receiver finds out, and nothing in it stops the receiver."""

from hypothesis import given
from hypothesis import strategies as st

from node.envs.registry import interaction
from node.envs.replay_turns import REPLY_CHARS_MAX, Parts, forgery, replies
from node.envs.scoring import score_group
from swarm.errors import Reject
from swarm.rollouts import Task

NAMES = ("guess_number", "text_maze", "calculator_sum", "file_lookup")
CALLS = ("<tool>calculator: ", "<tool>files: read ", "<tool>search: ", "</tool>", "n", "e", "7", "")
words = st.lists(st.sampled_from(CALLS) | st.text(max_size=8), max_size=4).map("".join)
tasks = st.builds(
    Task, st.sampled_from(NAMES), st.just("1"), st.just("{}"), st.just(3), st.integers(0, 99)
)
parts = st.lists(st.tuples(st.booleans(), words), max_size=7)


def honest(task: Task, texts: list[str]) -> Parts:
    source = interaction(task.environment)
    assert source is not None
    problem = source.problem(task)
    found: list[tuple[bool, str]] = []
    for text, reply in zip(texts, replies(source, problem, texts), strict=False):
        assert reply is None or len(reply) <= REPLY_CHARS_MAX
        found += [(True, text)] + ([] if reply is None else [(False, reply)])
    return found if found[-1][0] else found[:-1]


def found_in(task: Task, said: tuple[bool, Parts]) -> Reject | None:
    source = interaction(task.environment)
    assert source is not None
    return forgery(source, source.problem(task), said)


@given(tasks, st.booleans(), parts)
def test_nothing_that_is_said_stops_a_receiver(task: Task, cut: bool, said: Parts) -> None:
    score = score_group(task, [(cut, said)], "partial")
    assert all(0.0 <= reward <= 1.0 for reward in score.rewards)
    if score.forgery is None and not score.scorer_errors:
        texts = [text for mine, text in said if mine]
        assert list(said) == list(honest(task, texts))


@given(tasks, st.lists(words, min_size=1, max_size=6), st.data())
def test_a_changed_reply_is_a_forgery(task: Task, texts: list[str], data: st.DataObject) -> None:
    told = list(honest(task, texts))
    assert found_in(task, (True, told)) is None
    heard = [at for at, (mine, _) in enumerate(told) if not mine]
    if not heard:
        return
    at = data.draw(st.sampled_from(heard))
    changed = data.draw(words.filter(lambda word: word != told[at][1]))
    told[at] = (False, changed)
    assert found_in(task, (True, told)) is not None
