"""The work of a step in `bench_step.py`, the same for all that it compares. Free of imports of the
project's, for TRL's Python reads it too."""

from random import Random

GROUPS, COMPLETIONS, NEW_TOKENS = 4, 8, 16
TEMPERATURE, RATE = 0.6, 1e-6


def prompts(count: int) -> list[tuple[str, str]]:
    """System prompts and questions."""
    rng = Random(1)
    return [
        (
            "Give the final answer only.",
            f"What is {rng.randrange(10, 100)} + {rng.randrange(10, 100)}?",
        )
        for _ in range(count)
    ]
