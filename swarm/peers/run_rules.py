"""Serve and fetch the rules of a run, as bytes. The caller checks them by the fingerprint in the
run id."""

from typing import Final

from swarm.errors import RequestRefused
from swarm.identity import PeerId
from swarm.limits.quotas import Kind
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.requests import ask
from swarm.transport.base import ServeLimits, Transport
from swarm.wire import codec
from swarm.wire.messages import (
    RULES_BYTES_MAX,
    RUN_PROTOCOL,
    RUN_REPLY_BYTES_MAX,
    WANT_RUN_BYTES_MAX,
    RunReply,
    WantRun,
)

TIMEOUT_S: Final = 20.0


def serve_rules(transport: Transport, gater: ConnectionGater, run_id: str, rules: bytes) -> None:
    """Serve the run's rules within the quota. Rules over `RULES_BYTES_MAX` are not served."""

    async def serve(peer: PeerId, payload: bytes) -> bytes:
        want = gater.read(Kind.RUN, peer, payload, WantRun, WANT_RUN_BYTES_MAX)
        if want.run_id != run_id:
            raise RequestRefused(f"this node is of run {run_id}")
        if len(rules) > RULES_BYTES_MAX:
            raise RequestRefused("the rules of this run are too large to be handed on")
        return codec.encode(RunReply(type="run", rules=rules))

    limits = ServeLimits(
        WANT_RUN_BYTES_MAX, RUN_REPLY_BYTES_MAX, concurrent_max=4, concurrent_per_peer_max=1
    )
    transport.serve(RUN_PROTOCOL, serve, limits)


async def ask_for_rules(transport: Transport, peer: PeerId, run_id: str) -> bytes:
    """Fetch the rules of a run from a connected peer.

    Raises:
        TransportError: no answer, or refused, as by a peer of another run.
        RemoteProtocolError: the answer is malformed.
    """
    want = WantRun(type="want_run", run_id=run_id)
    reply = await ask(transport, peer, RUN_PROTOCOL, want, RunReply, RUN_REPLY_BYTES_MAX, TIMEOUT_S)
    return reply.rules
