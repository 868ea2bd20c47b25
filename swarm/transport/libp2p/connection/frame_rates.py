"""How fast a peer may send what costs more than its bytes, and why we end connections. Pure.

An opened stream costs its receiver some thousand times what it costs its sender, a ping an answer,
and a frame that carries little as much as one that carries a lot. An honest peer opens about fifty
streams in a second where it asks as often as quotas allow (`swarm/limits/quotas.py`), and sends a
ping in ten seconds. What is far over that has no other use than to keep us busy.
"""

from enum import StrEnum
from typing import Final

from swarm.limits.quotas import Rate, TokenBucket, Verdict

STREAMS_PER_S_MAX: Final = 500  # that a peer opens on one connection
STREAMS_AT_ONCE_MAX: Final = 4_000
PINGS_PER_S_MAX: Final = 10
PINGS_AT_ONCE_MAX: Final = 200
SMALL_FRAMES_PER_S_MAX: Final = 5_000  # of all kinds: those above, updates of windows, little data
SMALL_FRAMES_AT_ONCE_MAX: Final = 50_000
FRAME_BYTES_SMALL: Final = 1_024  # a frame that carries less is small


class Ended(StrEnum):
    """Why we ended a connection."""

    STREAMS = "stream_flood"
    PINGS = "ping_flood"
    SMALL_FRAMES = "frame_flood"
    UNREAD = "answers_unread"  # the peer asks and does not read what that brings about
    RULES = "muxer_rules"  # broken by the peer
    SILENT = "silent"  # the peer answers no ping, and nothing else comes of it either
    STALLED = "stalled"  # the socket takes nothing any more


FLOODS: Final = frozenset((Ended.STREAMS, Ended.PINGS, Ended.SMALL_FRAMES))


class FrameError(Exception):
    """The peer broke the rules of Yamux, or floods, or leaves; each ends the connection."""

    def __init__(self, text: str, reason: Ended | None = Ended.RULES) -> None:
        """`reason` None: it was the peer that ended it."""
        super().__init__(text)
        self.reason = reason


class FrameRates:
    """The rates of one connection."""

    def __init__(self, now_s: float) -> None:
        self._streams = _bucket(STREAMS_PER_S_MAX, STREAMS_AT_ONCE_MAX, now_s)
        self._pings = _bucket(PINGS_PER_S_MAX, PINGS_AT_ONCE_MAX, now_s)
        self._small_frames = _bucket(SMALL_FRAMES_PER_S_MAX, SMALL_FRAMES_AT_ONCE_MAX, now_s)

    def open_stream(self, now_s: float) -> None:
        """The peer opens a stream.

        Raises:
            FrameError: too many.
        """
        _take(self._streams, 1, now_s, Ended.STREAMS)

    def ping(self, now_s: float) -> None:
        """The peer wants an answer to a ping.

        Raises:
            FrameError: too many.
        """
        _take(self._pings, 1, now_s, Ended.PINGS)

    def small_frames(self, count: int, now_s: float) -> None:
        """So many frames came that carry little or nothing.

        Raises:
            FrameError: too many.
        """
        _take(self._small_frames, count, now_s, Ended.SMALL_FRAMES)


def _bucket(per_s: int, at_once: int, now_s: float) -> TokenBucket:
    return TokenBucket(Rate(per_s, at_once), at_once, now_s)


def _take(bucket: TokenBucket, count: int, now_s: float, reason: Ended) -> None:
    if bucket.take(count, now_s) is not Verdict.GRANTED:
        raise FrameError(f"too fast: {reason}", reason)
