"""One lamp of a few has to be lit: the least that a tiny policy can learn to call."""

ROWS = [
    {"prompt": f"lamp {lamp}", "lamp": lamp, "turns": [{"name": "on", "arguments": {"n": lamp}}]}
    for lamp in range(3)
]


class Lamps:
    def reset(self, lamp, **kwargs):
        self.lamp = lamp
        self.lit = None

    def on(self, n: int) -> str:
        """Light.

        Args:
            n: lamp
        """
        self.lit = n
        return "lit"

    @property
    def reward(self):
        return float(self.lit == self.lamp)
