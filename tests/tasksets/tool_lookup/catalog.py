"""An invented parts catalog, generated from a seed."""

import random
from functools import lru_cache

from pydantic import BaseModel

NOUNS = ["bracket", "gasket", "bearing", "valve", "spring", "coupling", "washer"]
ADJECTIVES = ["brass", "steel", "nylon", "rubber", "copper"]
SHELVES = ["A1", "A2", "B1", "B2", "C1"]


class Part(BaseModel):
    """One row of the catalog."""

    code: str
    name: str
    shelf: str
    stock: int
    price_cents: int


@lru_cache(maxsize=4)
def build_catalog(seed: int, size: int) -> tuple[Part, ...]:
    """The catalog for this seed, in order of part code."""
    rng = random.Random(seed)
    codes = sorted(rng.sample(range(1000, 10000), size))
    return tuple(
        Part(
            code=f"P-{code}",
            name=f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
            shelf=rng.choice(SHELVES),
            stock=rng.randint(0, 500),
            price_cents=rng.randint(5, 5000),
        )
        for code in codes
    )
