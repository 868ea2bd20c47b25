"""From first turns to whole transcripts."""

from collections.abc import Sequence

import pytest

from node.config import RunConfig
from node.envs.registry import interaction
from node.envs.replay_turns import forgery, said_of
from node.interfaces.engine import Context, Engine, EngineInfo, Outcome, Request, Sampling
from node.run.turns import Player, completions
from node.verify.assignment import assigned_task
from node.verify.held_out import Assignment
from node.verify.verifier import InlineVerifier
from swarm.rollouts import Completion, FinishReason, segments_fault, spans_fault
from tests.support import run as run_async
from tests.unit.tasks_support import ALICE

PROMPTS = ("one", "two")
SAMPLING = Sampling(max_new_tokens=20)


def run_of(*names: str) -> RunConfig:
    environments = [{"name": name} for name in names]
    return RunConfig.model_validate({"name": "play", "environments": environments})


class Scripted(Engine):
    """An engine that says what it was told to, turn by turn, a token for each letter and its end.
    Each call has the next policy version."""

    maker = EngineInfo("scripted")

    def __init__(self, turns: Sequence[Sequence[str]], cut_at: int | None = None) -> None:
        self.turns = turns  # of each completion
        self.cut_at = cut_at  # a turn, in which the context is full
        self.contexts: list[list[Context]] = []
        self.falls_at = 0  # a turn from which on an older policy serves; 0: none

    def said(self, text: str) -> Completion:
        ids = (*(ord(letter) for letter in text), 0)
        version = 5 + len(self.contexts)
        if self.falls_at and len(self.contexts) >= self.falls_at:
            version = 1
        return Completion(text, ids, (-0.5,) * len(ids), FinishReason.STOP, version)

    async def generate(
        self, prompts: Sequence[str], each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        assert each * len(prompts) == len(self.turns)
        made = [self.said(turns[0]) for turns in self.turns]
        return [tuple(made[at : at + each]) for at in range(0, len(made), each)]

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        self.contexts.append(list(contexts))
        if len(self.contexts) == self.cut_at:
            return [Completion("", (), (), FinishReason.LENGTH, 0)] * len(contexts)
        scripts = {turns[0]: turns for turns in self.turns}
        found = []
        for context in contexts:
            ids = context.turns[0][0]
            first = "".join(map(chr, ids[:-1]))
            found.append(self.said(scripts[first][len(context.turns)]))
        return found


def play(run: RunConfig, engine: Scripted, sampling: Sampling = SAMPLING) -> list[Completion]:
    async def main() -> list[Completion]:
        task = assigned_task(run, ALICE, 0)
        made = await completions(
            Player(run, engine, InlineVerifier(run)),  # type: ignore[arg-type]
            [Assignment(task, "p")],
            len(engine.turns),
            sampling,
            1,
        )
        return list(made[0])

    return run_async(main)


def secret(run: RunConfig) -> tuple[str, list[str]]:
    source = interaction("guess_number")
    assert source is not None
    right = source.problem(assigned_task(run, ALICE, 0)).answer
    return right, [str(n) for n in range(1, 16) if str(n) != right]


def test_transcripts_end_where_the_task_says_so_and_are_as_a_receiver_works_them_out() -> None:
    run = run_of("guess_number")
    right, (a, b, c, d, *_) = secret(run)
    engine = Scripted([(right,), (a, right), (b, c, d, a), (d, "x", "y", right)])
    made = play(run, engine)
    source = interaction("guess_number")
    assert source is not None
    problem = source.problem(assigned_task(run, ALICE, 0))
    assert [len(each.segments) for each in made] == [1, 3, 7, 7]
    assert [len(batch) for batch in engine.contexts] == [3, 2, 2]  # all of a turn in one batch
    for completion in made:
        assert completion.finish_reason is FinishReason.STOP
        assert forgery(source, problem, said_of(completion)) is None
        assert segments_fault(completion, len(completion.token_ids)) is None
        assert spans_fault(completion) is None
    assert made[1].policy_version == 5
    assert [version for version, _ in made[2].spans] == [5, 6, 7, 8]
    context = engine.contexts[0][0]
    assert context.turns == ((made[1].token_ids[: len(a) + 1], made[1].parts()[1][1]),)


def test_all_turns_together_have_the_runs_limit() -> None:
    run = run_of("guess_number")
    _, (a, b, c, d, *_) = secret(run)
    engine = Scripted([(a, b, c, d)])
    (made,) = play(run, engine, Sampling(max_new_tokens=len(a) + len(b) + 2))
    assert engine.contexts[0][0].tokens_max == len(b) + 1
    assert len(made.segments) == 3
    assert made.finish_reason is FinishReason.LENGTH


def test_a_context_that_is_full_ends_a_transcript_after_its_last_turn() -> None:
    run = run_of("guess_number")
    _, (a, b, c, d, *_) = secret(run)
    (made,) = play(run, Scripted([(a, b, c, d)], cut_at=2))
    assert len(made.segments) == 3
    assert made.finish_reason is FinishReason.LENGTH
    source = interaction("guess_number")
    assert source is not None
    problem = source.problem(assigned_task(run, ALICE, 0))
    assert forgery(source, problem, said_of(made)) is None


def test_a_turn_by_an_older_policy_ends_a_transcript_before_it() -> None:
    """An engine may have gone back meanwhile; no transcript falls from a version to an older."""
    run = run_of("guess_number")
    _, (a, b, c, d, *_) = secret(run)
    engine = Scripted([(a, b, c, d)])
    engine.falls_at = 2
    (made,) = play(run, engine)
    assert (len(made.segments), made.finish_reason) == (3, FinishReason.LENGTH)
    assert spans_fault(made) is None


@pytest.mark.parametrize("names", [("scripted_sum",), ("scripted_sum", "guess_number")])
def test_tasks_of_one_turn_are_generated_as_ever(names: tuple[str, ...]) -> None:
    run = run_of(*names)
    task = next(
        task
        for index in range(100)
        if (task := assigned_task(run, ALICE, index)).environment == "scripted_sum"
    )

    async def main() -> None:
        engine = Scripted([("1",), ("2",)])
        player = Player(run, engine, InlineVerifier(run))  # type: ignore[arg-type]
        (made,) = await completions(player, [Assignment(task, "p")], 2, SAMPLING, 1)
        assert [each.segments for each in made] == [(), ()]
        assert not engine.contexts

    run_async(main)


def test_later_turns_have_the_temperature_that_was_asked_for_the_first() -> None:
    """Of two tasks one is sampled at the run's temperature and one at its own."""
    run, heats = run_of("guess_number"), list[float]()

    class Heated(Scripted):
        async def go_on(
            self, contexts: Sequence[Context], sampling: Sampling, seed: int
        ) -> list[Completion]:
            heats.append(sampling.temperature)
            return await super().go_on(contexts, sampling, seed)

        async def sample(
            self, requests: Sequence[Request], sampling: Sampling, seed: int, noise: float = 0.0
        ) -> list[Outcome]:
            return [Outcome((self.said(turns[0]),)) for turns in self.turns]

    async def main() -> None:
        tasks = [assigned_task(run, ALICE, at) for at in (0, 1)]
        requests = [Request("p", 1), Request("p", 1, temperature=0.5)]
        engine = Heated([["<guess>50</guess>", "a"], ["<guess>51</guess>", "b"]])
        player = Player(run, engine, InlineVerifier(run))  # type: ignore[arg-type]
        played = await player.begin(tasks, requests, SAMPLING, 1)
        await player.go_on(played, SAMPLING, 1)

    run_async(main)
    assert heats == [1.0, 0.5]
