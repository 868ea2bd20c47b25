"""The rules of a run, for whoever has only its id: any member hands them on.

What they are is the caller's affair: here they are bytes. The id holds a fingerprint of them, by
which the caller tells whether they are those that were asked for.
"""

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
    """Hand the rules of this node's run to whoever asks, as often as the quota has it. Rules of
    over `RULES_BYTES_MAX` do not travel."""

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
    """What a connected peer says are the rules of a run.

    Raises:
        TransportError: it does not answer, or refuses, as one of another run does.
        RemoteProtocolError: its answer is no such message.
    """
    want = WantRun(type="want_run", run_id=run_id)
    reply = await ask(transport, peer, RUN_PROTOCOL, want, RunReply, RUN_REPLY_BYTES_MAX, TIMEOUT_S)
    return reply.rules
