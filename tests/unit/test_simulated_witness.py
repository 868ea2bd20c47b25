"""The account of what a simulated learner trained on: each kind of violation is found."""

from node.interfaces.trainer import TrainingGroup
from swarm.rollouts import Completion, FinishReason, Spans
from tests.simulation.witness import EXAMPLES_MAX, Witness


def completion(version: int, spans: Spans = ()) -> Completion:
    return Completion("12", (1, 2), (-1.0, -1.0), FinishReason.STOP, version, spans)


def group(*completions: Completion, prompt: str = "1+1=") -> TrainingGroup:
    return TrainingGroup(prompt, completions, (0.0,) * len(completions), True, "worker")


def test_a_group_at_the_bound_is_none_over_it_and_its_oldest_token_counts() -> None:
    witness = Witness(bound=2)
    witness.trained([group(completion(5), completion(3, ((3, 1), (5, 1))))], version=5)
    assert (witness.worst, witness.violations, witness.true_violations) == (2, 0, 0)
    witness.trained([group(completion(5), completion(3, ((3, 1), (5, 1))), prompt="2")], version=6)
    assert (witness.worst, witness.violations) == (3, 1)
    assert witness.worst_at == {5: 2, 6: 3}


def test_a_version_that_does_not_exist_is_a_violation() -> None:
    witness = Witness(bound=2)
    witness.trained([group(completion(7))], version=6)
    assert witness.violations == 1


def test_what_really_made_a_group_counts_beside_what_it_says() -> None:
    witness = Witness(bound=2)
    witness.made("worker", "1+1=", 1)
    witness.trained([group(completion(5))], version=5)
    assert (witness.violations, witness.true_violations, witness.false_groups) == (0, 1, 1)
    assert witness.worst_true == 4


def test_a_group_that_is_trained_on_twice_is_noticed_unless_the_first_time_was_lost() -> None:
    witness = Witness(bound=2)
    witness.trained([group(completion(1))], version=1)
    witness.trained([group(completion(1))], version=2)
    assert witness.repeated == 1
    witness.lost()
    witness.trained([group(completion(1))], version=1)
    assert witness.repeated == 1


def test_examples_are_few() -> None:
    witness = Witness(bound=0)
    for number in range(2 * EXAMPLES_MAX):
        witness.trained([group(completion(0), prompt=str(number))], version=9)
    assert witness.violations == 2 * EXAMPLES_MAX
    assert len(witness.examples) == EXAMPLES_MAX
