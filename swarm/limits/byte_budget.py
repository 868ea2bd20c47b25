"""A byte budget that refills evenly: how much may be fetched or served in a second. Pure."""


class ByteBudget:
    """A token bucket that holds one second's worth at most and may be overdrawn once.

    Overdrawing lets a record larger than one second's worth through; what follows waits longer.
    """

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self._rate = bytes_per_s
        self._left = bytes_per_s
        self._at = now

    def spend(self, size_bytes: int, now: float) -> float:
        """Take bytes out. Returns the seconds to wait before using them, 0.0 if none."""
        self._refill(now)
        self._left -= size_bytes
        return max(0.0, -self._left / self._rate)

    def is_spent(self, now: float) -> bool:
        """Whether nothing is left at the moment."""
        self._refill(now)
        return self._left <= 0

    def _refill(self, now: float) -> None:
        self._left = min(self._rate, self._left + self._rate * (now - self._at))
        self._at = now
