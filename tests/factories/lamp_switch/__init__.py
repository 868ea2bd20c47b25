"""One lamp of a few has to be lit: the least that a tiny policy can learn to call."""

SAID = "Lamp {} is lit now, as was wished for, and all the others are dark."  # as hard as a call
ROWS = [
    {
        "prompt": f"lamp {lamp}",
        "lamp": lamp,
        "turns": [{"name": "on", "arguments": {"n": lamp}}, SAID.format(lamp)],
    }
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
