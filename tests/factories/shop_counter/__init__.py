"""A shop with several tools and a state, which scores itself by `get_reward`."""

import random
from typing import Literal

PRICES = {"apple": 3, "bread": 7, "candle": 12, "drum": 40}


class Shop:
    def reset(self, **kwargs) -> str:
        self._basket: dict[str, int] = {}
        self._paid = 0
        self._wanted = {name: random.randint(1, 3) for name in random.sample(sorted(PRICES), 2)}
        wanted = " and ".join(f"{count} x {name}" for name, count in sorted(self._wanted.items()))
        return f"Buy {wanted}, and pay exactly."

    @property
    def total(self) -> int:
        return sum(PRICES[name] * count for name, count in self._basket.items())

    def price(self, names: list[str]) -> dict:
        """Tell prices.

        Args:
            names: The goods
        """
        return {name: PRICES[name] for name in names}

    def add(self, name: Literal["apple", "bread", "candle", "drum"], count: int = 1) -> str:
        """Put goods into the basket.

        Args:
            name: The goods
            count: How many

        Returns:
            The sum to pay.
        """
        if name not in PRICES:
            raise KeyError(name)
        if not 0 < count < 100:
            raise ValueError("count must be from 1 to 99")
        self._basket[name] = self._basket.get(name, 0) + count
        return f"to pay: {self.total}"

    async def pay(self, amount: float) -> str:
        """Pay.

        Args:
            amount: The sum
        """
        self._paid += amount
        return f"paid: {self._paid:g}"

    def get_reward(self) -> float:
        if self._basket != self._wanted:
            return 0.0
        return 1.0 if self._paid == self.total else 0.5
