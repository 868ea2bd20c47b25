"""A worker's side of leases: it asks for them and hands in groups.

A submission is sent again until it is answered or its lease ends; the learner counts it once.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

import trio

from swarm.errors import NotServed, RemoteProtocolError, RequestRefused, TransportError
from swarm.identity import Identity, PeerId
from swarm.limits.backoff import Backoff
from swarm.peers.reputation import Ledger
from swarm.peers.requests import ask
from swarm.rollouts import RolloutGroup
from swarm.transport.base import Transport
from swarm.wire import codec
from swarm.wire.messages import (
    LEASE_REPLY_BYTES_MAX,
    LEASES_PROTOCOL,
    SUBMISSION_REPLY_BYTES_MAX,
    SUBMISSIONS_PROTOCOL,
    LeaseReply,
    SubmissionReply,
    Verdict,
    WantLease,
    WireModel,
)

M = TypeVar("M", bound=WireModel)

LEASE_TIMEOUT_S: Final = 15.0
SUBMIT_TIMEOUT_S: Final = 60.0  # a learner answers once it has scored the group
AGAIN: Final = Backoff(1.0, 30.0)  # seconds between two tries
TURNED_AWAY_MAX: Final = (
    2  # refusals of one group: a busy learner may take the second; more may ban
)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease on the tasks at places 0 to `groups` - 1 of a stream."""

    id: bytes  # 16
    learner_version: int  # when it was granted
    stream: str
    groups: int
    ends_s: float  # on the loop's clock
    width: int = 0  # completions of each task; 0: those of the run
    limit: int = 0  # most tokens of a completion; 0: those of the run


@dataclass(frozen=True, slots=True)
class Declined:
    """No lease: why, and when to ask again."""

    reason: str
    retry_s: float


class LeaseClient:
    def __init__(
        self,
        run_id: str,
        learner: PeerId,
        identity: Identity,
        transport: Transport,
        ledger: Ledger,
        rng: Random,
    ) -> None:
        self.learner = learner
        self._run_id = run_id
        self._identity = identity
        self._transport = transport
        self._ledger = ledger
        self._rng = rng
        self._refusals = 0  # in a row
        self.failures = 0  # requests that got no answer of any use
        self.verdicts: Counter[str] = Counter()  # accepted, why refused, undelivered or turned_away
        self.learner_version = 0  # the newest that was heard of

    async def lease(self, version: int) -> HeldLease | Declined:
        """Ask for tasks, with the policy version that serves here."""
        request = WantLease(type="want_lease", run_id=self._run_id, version=version)
        asked_s = trio.current_time()
        try:
            reply = await self._ask(
                LEASES_PROTOCOL, request, LeaseReply, LEASE_REPLY_BYTES_MAX, LEASE_TIMEOUT_S
            )
        except NotServed:
            return Declined("the learner has no work to give yet", self._wait_s())
        except RequestRefused as error:
            why = str(error).strip("'")
            return Declined(f"the learner turns requests away ({why})", self._wait_s())
        except TransportError:
            return Declined("the learner does not answer", self._wait_s())
        except RemoteProtocolError as error:
            return Declined(f"the learner's answer is no lease: {error.detail}", self._wait_s())
        self._refusals = 0
        self.learner_version = max(self.learner_version, reply.learner_version)
        if not reply.groups:
            return Declined(reply.reason, max(0.05, reply.retry_ms / 1e3))
        return HeldLease(
            id=reply.lease,
            learner_version=reply.learner_version,
            stream=reply.stream,
            groups=reply.groups,
            ends_s=asked_s + reply.life_ms / 1e3,
            width=reply.width,
            limit=reply.limit,
        )

    async def submit(self, lease: HeldLease, group: RolloutGroup) -> Verdict | None:
        """Hand a group in. None: not delivered before the lease ended, or turned away."""
        group_id, submission = codec.submission(lease.id, group, self._identity)
        tries = turned_away = 0
        while True:
            try:
                reply = await self._ask(
                    SUBMISSIONS_PROTOCOL,
                    submission,
                    SubmissionReply,
                    SUBMISSION_REPLY_BYTES_MAX,
                    SUBMIT_TIMEOUT_S,
                )
            except RequestRefused:
                turned_away += 1
                if turned_away == TURNED_AWAY_MAX:
                    self.verdicts["turned_away"] += 1
                    return None
            except (TransportError, RemoteProtocolError):
                self.failures += 1
            else:
                self.learner_version = max(self.learner_version, reply.learner_version)
                if reply.verdict != "again":
                    self.verdicts[reply.reason or reply.verdict] += 1
                    verdict: Verdict = reply.verdict
                    if verdict == "accepted":
                        self._ledger.credit.made([group_id], sent=True)
                    return verdict
            left_s = lease.ends_s - trio.current_time()
            if left_s <= 0:
                self.verdicts["undelivered"] += 1
                return None
            await trio.sleep(min(AGAIN.spread(tries, self._rng), left_s))
            tries += 1

    async def _ask(
        self, protocol: str, question: WireModel, kind: type[M], bytes_max: int, timeout_s: float
    ) -> M:
        to = (self._transport, self.learner, protocol)
        return await ask(*to, question, kind, bytes_max, timeout_s, self._ledger)

    def _wait_s(self) -> float:
        """Until the next try after a failure: longer at each in a row."""
        self._refusals += 1
        return AGAIN.spread(self._refusals - 1, self._rng)
