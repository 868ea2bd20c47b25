"""Writes arithmetic word problems as JSON lines, the same ones for the same arguments:

python scripts/word_problems.py 500 > problems.jsonl
python scripts/word_problems.py COUNT [SEED [MOST]]       MOST: numbers are drawn up to it
"""

import json
import sys
from collections.abc import Iterator
from random import Random

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "pens", "shells", "stamps")


def word_problems(count: int, seed: int = 0, most: int = 60) -> Iterator[dict[str, str]]:
    """So many different questions, each with its answer."""
    rng, seen = Random(seed), set[str]()
    while len(seen) < count:
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        have, more, each = (rng.randint(2, at_most) for at_most in (most, most, min(most, 12)))
        less = rng.randint(1, have)
        question, answer = rng.choice(
            (
                (f"{name} has {have} {thing} and gets {more} more. How many now?", have + more),
                (f"{name} has {have} {thing} and loses {less}. How many are left?", have - less),
                (f"{each} boxes hold {more} {thing} each. How many in all?", each * more),
                (
                    f"{name} shares {each * more} {thing} among {each} friends. How many for each?",
                    more,
                ),
            )
        )
        if question not in seen:
            seen.add(question)
            yield {"question": question, "answer": str(answer)}


if __name__ == "__main__":
    for problem in word_problems(*map(int, sys.argv[1:4])):
        print(json.dumps(problem))
