"""Pacing of answers: the bytes that may be on their way at once. Pure.

An uplink should always have something to send. The next answer should be chosen as late as
possible, for an answer on its way can neither be called back nor give way to a more urgent one. So
as many bytes are let out as the link carries in the time of one answer on an empty link, and half
as many again: this finds out whether the link is faster than was measured. The
rate is the best of the last seconds, the time the least of them (as in BBR, Cardwell et al. 2016).
"""

import math
from collections import deque

GAIN = 1.5
IDLE_SHARE = 0.5  # of what the link carries in the time of an answer
ANSWERS_MIN = 4  # on their way at once, whatever is measured
MEMORY_S = 10.0
TIME_S = 0.15  # that an answer takes, before one has left
BUCKET_S = 0.25  # over which a rate is measured, at least
BUCKET_ANSWERS = (
    3.0  # or so many times what an answer takes: those that share the link end together
)
SAMPLES_MAX = 4096
UNSENT_BYTES = 65_536  # that sockets hold of answers which left, about
UNSENT_S_MIN = 0.01  # below which a link is too fast for that to matter


class Pacer:
    """Lets answers out. `rate_bytes_per_s` starts as what was measured earlier, if anything was."""

    def __init__(self, rate_bytes_per_s: float = 0.0) -> None:
        self._given = rate_bytes_per_s
        self._out_bytes = 0
        self._out = 0
        self._bucket_since_s = 0.0  # set when the first answer leaves
        self._bucket_bytes = 0
        self._was_full = False
        self._left_s = -math.inf  # when the last answer did
        self._unsent_bytes = 0.0  # that sockets held then, at most
        self._rates: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._times: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)  # ascending

    def has_room(self, size_bytes: int) -> bool:
        """True if an answer of that size may leave now."""
        if self._out < ANSWERS_MIN:
            return True
        least_s = self._times[0][1] if self._times else TIME_S
        room = self._out_bytes + size_bytes <= GAIN * self.rate() * least_s
        self._was_full |= not room
        return room

    def is_idle(self, now_s: float) -> bool:
        """True if the uplink will soon have nothing to send."""
        unsent_s = self._unsent_bytes / self.rate() if self.rate() else 0.0
        if unsent_s > UNSENT_S_MIN and now_s - self._left_s < unsent_s:
            return False
        least_s = self._times[0][1] if self._times else TIME_S
        return self._out_bytes <= IDLE_SHARE * self.rate() * least_s

    def rate(self) -> float:
        """Bytes a second that the uplink was seen to carry; at first what was given."""
        return max((rate for _, rate in self._rates), default=self._given)

    def start(self, size_bytes: int, now_s: float) -> None:
        """An answer is on its way."""
        if not self._out:  # the time without any says nothing of the link
            self._bucket_since_s, self._bucket_bytes, self._was_full = now_s, 0, False
        if not self._rates:
            self._rates.append((now_s, self._given))
        self._out += 1
        self._out_bytes += size_bytes

    def give_up(self, size_bytes: int) -> None:
        """It waits for its reader, and says nothing of the link."""
        self._out -= 1
        self._out_bytes -= size_bytes

    def done(self, size_bytes: int, took_s: float, now_s: float) -> None:
        """It has left."""
        self._out -= 1
        self._out_bytes -= size_bytes
        gone_bytes = self.rate() * (now_s - self._left_s)  # infinitely many before the first
        left_bytes = max(0.0, self._unsent_bytes - gone_bytes) if self._unsent_bytes else 0.0
        self._unsent_bytes = min(UNSENT_BYTES, left_bytes + size_bytes)
        self._left_s = now_s
        while self._times and self._times[-1][1] >= took_s:
            self._times.pop()
        self._times.append((now_s, took_s))
        while self._times[0][0] < now_s - MEMORY_S:
            self._times.popleft()
        self._bucket_bytes += size_bytes
        width_s = now_s - self._bucket_since_s
        is_whole = not self._out  # nothing was on its way at the start either
        if width_s >= (BUCKET_S if is_whole else max(BUCKET_S, BUCKET_ANSWERS * took_s)):
            rate = self._bucket_bytes / width_s
            # a pause says nothing of the link: only what is more than was known counts then
            if self._was_full or rate > self.rate():
                self._rates.append((now_s, rate))
            while len(self._rates) > 1 and self._rates[0][0] < now_s - MEMORY_S:
                self._rates.popleft()
            self._bucket_since_s, self._bucket_bytes, self._was_full = now_s, 0, False
