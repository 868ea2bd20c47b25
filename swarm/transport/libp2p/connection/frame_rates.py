"""Rate limits for cheap frames that cost the receiver work, and reasons for ending connections.

An honest peer opens about 50 streams a second at most and sends a ping every 10 s.
"""

from enum import StrEnum
from typing import Final

from swarm.limits.quotas import Rate, TokenBucket, Verdict

STREAMS_PER_S_MAX: Final = 500  # opened by the peer on one connection
STREAMS_AT_ONCE_MAX: Final = 4_000
PINGS_PER_S_MAX: Final = 10
PINGS_AT_ONCE_MAX: Final = 200
SMALL_FRAMES_PER_S_MAX: Final = 5_000  # includes the two above, window updates and short data
SMALL_FRAMES_AT_ONCE_MAX: Final = 50_000
FRAME_BYTES_SMALL: Final = 1_024  # less payload makes a small frame


class Ended(StrEnum):
    """Reason why this node ended a connection."""

    STREAMS = "stream_flood"
    PINGS = "ping_flood"
    SMALL_FRAMES = "frame_flood"
    UNREAD = "answers_unread"  # the peer causes answers and does not read them
    RULES = "muxer_rules"  # the peer broke the rules of Yamux
    SILENT = "silent"  # no answer to a ping, and no other data
    STALLED = "stalled"  # the socket accepts no more data


FLOODS: Final = frozenset((Ended.STREAMS, Ended.PINGS, Ended.SMALL_FRAMES))


class FrameError(Exception):
    """The connection must end: the peer broke the rules, flooded, or left."""

    def __init__(self, text: str, reason: Ended | None = Ended.RULES) -> None:
        """`reason` None: the peer ended the connection."""
        super().__init__(text)
        self.reason = reason


class FrameRates:
    def __init__(self, now_s: float) -> None:
        limits = {
            Ended.STREAMS: (STREAMS_PER_S_MAX, STREAMS_AT_ONCE_MAX),
            Ended.PINGS: (PINGS_PER_S_MAX, PINGS_AT_ONCE_MAX),
            Ended.SMALL_FRAMES: (SMALL_FRAMES_PER_S_MAX, SMALL_FRAMES_AT_ONCE_MAX),
        }
        self._buckets = {
            flood: TokenBucket(Rate(per_s, at_once), at_once, now_s)
            for flood, (per_s, at_once) in limits.items()
        }

    def count(self, flood: Ended, now_s: float, frames: int = 1) -> None:
        """Count frames of the kind that `flood` is about.

        Raises:
            FrameError: too many.
        """
        if self._buckets[flood].spend(frames, now_s) is not Verdict.GRANTED:
            raise FrameError(f"too fast: {flood}", flood)
