"""The errors of this project, by who is to blame. `AssertionError` is always a bug of ours."""

from collections.abc import Iterable
from enum import StrEnum


class Reject(StrEnum):
    """Reason why data of a peer was not accepted; `status` counts by these names."""

    MALFORMED = "malformed"  # not MessagePack, wrong schema, trailing or missing bytes
    OVERSIZE = "oversize"  # over a limit of `swarm.wire.messages`
    BAD_SIGNATURE = "bad_signature"  # the signature does not fit the bytes and the signer
    WRONG_PRODUCER = "wrong_producer"  # the signer is not the producer that the record names
    WRONG_RUN = "wrong_run"  # a record of another run, passed off as one of this
    OTHER_RUN = "other_run"  # a peer that takes part in another run, and says so
    EXPIRED = "expired"  # past its expiry, or with a life longer than the run allows
    FUTURE = "future"  # created later than our clock plus the allowed skew
    UNASSIGNED_TASK = "unassigned_task"  # not the task that this producer has at this index
    HELD_OUT = "held_out"  # a problem of the evaluation set, which nobody may train on
    DUPLICATE_TASK = "duplicate_task"  # a second group for a task that its producer already did
    NOT_REQUESTED = "not_requested"  # an answer holds a record that was not asked for
    UNVERIFIABLE = "unverifiable"  # the environment's scorer failed on it
    FORGED_OBSERVATION = "forged_observation"  # a transcript in which the task says something else
    FORGED_TOOL_RESULT = "forged_tool_result"  # likewise, what a tool gave back
    SKIPPED_TURN = "skipped_turn"  # a transcript with a turn too few, or one after its end
    OTHER_TRANSCRIPT = "other_transcript"  # nothing that was said in it is of this task
    OVERRUN = "overrun"  # scoring it used up the CPU time that a group may take
    UNDECIDED = "undecided"  # too near to a limit for all machines to agree on what it is worth
    UNAVAILABLE = "unavailable"  # advertised groups, then could not be reached or did not answer
    QUOTA = "quota"  # larger than the whole pool
    NOT_A_PUBLISHER = "not_a_publisher"  # announces weights, and the run's rules do not name it
    REPUBLISHED = "republished"  # other weights under a version that was published before
    WRONG_HASH = "wrong_hash"  # other bytes than those with the hash that was asked for
    FALSE_LOGPROBS = "false_logprobs"  # not of the policy version that it claims
    FLOOD = "flood"  # went on asking at a rate that had been refused


class SwarmError(Exception):
    """Root of all errors that this project raises on purpose."""


class RemoteProtocolError(SwarmError):
    """A peer broke the rules: counted under `reason`, and work goes on. `signer`: the peer whose
    signature over the bytes held, if any, so that an honest relay is not blamed."""

    def __init__(self, reason: Reject, detail: str, signer: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.signer = signer


class TransportError(SwarmError):
    """The network to a peer failed, maybe by no fault of the peer: retried within a budget."""


class PeerUnreachable(TransportError):
    """No connection could be made, or it was lost."""


class DialHeldBack(PeerUnreachable):
    """The address was not dialled: too soon, or too many dials like it."""


class RequestTimeout(TransportError):
    """The answer did not come in time."""


class RequestRefused(TransportError):
    """The peer will not serve this request now."""


class NotServed(RequestRefused):
    """The peer does not serve the protocol, or not yet."""


class LocalProtocolError(SwarmError):
    """This node broke a rule of its own: it ends."""


class IdentityInUse(SwarmError):
    """Another live node runs under this node's key: the newcomer stops."""


class ChildFailed(SwarmError):
    """A child process (trainer, engine, verifier) failed: restarted with back-off."""


class WeightsMismatch(SwarmError):
    """Weights are not what a manifest says: a wrong base, a publisher's error, or a fault of
    this machine. `entry`: the tensor or file that disagrees, if known."""

    def __init__(self, detail: str, entry: str | None = None) -> None:
        super().__init__(f"weights: {detail}")
        self.entry = entry


class StorageFailed(SwarmError):
    """The data directory can no longer be written or read: the node ends with one line."""


class OutputFailed(SwarmError):
    """Standard output cannot be written. `errno` EPIPE: its reader has left."""

    def __init__(self, errno: int | None, why: str | None) -> None:
        super().__init__(f"standard output: {why}")
        self.errno = errno


class CannotHeal(SwarmError):
    """The same failure came again at the same step: another start does not mend it."""


class StoreFull(SwarmError):
    """The disk or the bound on chunks of weights leaves no room for what is in use."""


class NoRoute(SwarmError):
    """A version cannot be made from what is held and what is offered."""


class ConfigError(SwarmError):
    """Bad input at start. One line: field, value, and what to do."""


def first_of(error: BaseException) -> BaseException:
    """The first error in nested groups of errors; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def require(owner: object, checks: Iterable[tuple[str, bool, str]], what: str = "") -> None:
    """Raise ConfigError for the first bad one of (field, is good, hint); `what` goes before."""
    for field, good, hint in checks:
        if not good:
            raise ConfigError(f"{what}{field} = {getattr(owner, field)!r}: {hint}")
