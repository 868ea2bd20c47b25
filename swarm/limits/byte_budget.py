"""Rate limit in bytes per second. Pure."""


class ByteBudget:
    """A token bucket of one second's worth that may be overdrawn once, so that large
    records pass."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self._rate = bytes_per_s
        self._left = bytes_per_s
        self._at = now

    def spend(self, size_bytes: int, now: float) -> float:
        """Spend bytes. Returns the seconds to wait before using them."""
        self._refill(now)
        self._left -= size_bytes
        return max(0.0, -self._left / self._rate)

    def is_spent(self, now: float) -> bool:
        self._refill(now)
        return self._left <= 0

    def _refill(self, now: float) -> None:
        self._left = min(self._rate, self._left + self._rate * (now - self._at))
        self._at = now
