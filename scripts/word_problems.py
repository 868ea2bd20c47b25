"""Writes arithmetic word problems as JSON lines, the same ones for one count and seed:

python scripts/word_problems.py 500 > problems.jsonl
"""

import json
import sys
from collections.abc import Iterator
from random import Random

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "pens", "shells", "stamps")


def word_problems(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """So many different questions, each with its answer."""
    rng, seen = Random(seed), set[str]()
    while len(seen) < count:
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        have, more, each = rng.randint(2, 60), rng.randint(2, 60), rng.randint(2, 12)
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
    for problem in word_problems(int(sys.argv[1]), int((*sys.argv, "0")[2])):
        print(json.dumps(problem))
