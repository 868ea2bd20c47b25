"""Honest peers: how long an ordinary request takes, and whether newcomers get in.

As a program, `python -m tests.hostile.honest ADDRESS RUN_ID NETWORK`, it is two honest peers on the
project's own transport, each of which asks for a group seven times a second, and a newcomer every
two seconds from a block that nobody has come from yet. It prints a JSON object for each answer, and
ends with its input.

A request that is late because the one before it was slow counts from when it was due, so that a
node that stalls is not asked less often for it.
"""

import json
import secrets
import sys
import time
from contextlib import suppress

import trio

from swarm.errors import SwarmError
from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.reachability import ReachRules
from swarm.wire.messages import (
    CHUNK_BYTES_MAX,
    CHUNKS_PROTOCOL,
    GROUPS_REPLY_BYTES_MAX,
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
)
from tests.hostile.messages import hello, hello_reply, want, want_chunk
from tests.hostile.wire import FAILURES, Door, Spent, admitted

NOT_SERVED = "does not serve"
NOT_HERE = "that artifact is not here"
PEERS = 2
ASKS_PER_S = 7.0
TIMEOUT_S = 10.0  # an honest request that takes longer counts as so long, and as failed
NEWCOMER_EVERY_S = 2.0
NEWCOMER_TIMEOUT_S = 15.0
HEARTBEAT_S = 5.0
BLOCKS = 240  # that newcomers come from, one after the other


def say(who: str, began_s: float, why: str) -> None:
    """Print one answer, or why there was none; times are of the machine's monotonic clock."""
    now_s = time.monotonic()
    record = {"who": who, "at_s": now_s, "ms": round(1_000 * (now_s - began_s), 2), "ok": not why}
    sys.stdout.write(json.dumps(record | {"why": why}) + "\n")
    sys.stdout.flush()


class HonestPeer:
    """A peer that asks, on the project's own transport."""

    def __init__(
        self, transport: Libp2pTransport, identity: Identity, address: str, run_id: str
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._address = address
        self._run_id = run_id
        self._node = PeerId(address.rpartition("/")[2])
        self._serves_rollouts = True
        limits = ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX)
        transport.serve(HELLO_PROTOCOL, self._answer, limits)

    async def _answer(self, peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return hello_reply(self._run_id, self._transport.addresses()[:1])

    async def ask_on(self) -> None:
        """Ask for a group at an even pace."""
        due_s = time.monotonic()
        while True:
            await trio.sleep(max(0.0, due_s - time.monotonic()))
            say("honest", due_s, await self._ask())
            due_s += 1 / ASKS_PER_S
            if time.monotonic() - due_s > TIMEOUT_S:  # do not hunt a node that is gone
                due_s = time.monotonic()

    async def _ask(self) -> str:
        """Ask for a group that nobody has. A learner that draws none serves no groups: it is asked
        for a chunk that nobody has, and to say so is its answer."""
        if self._serves_rollouts:
            payload = want(self._run_id)
            why = await self._request(ROLLOUTS_PROTOCOL, payload, GROUPS_REPLY_BYTES_MAX)
            self._serves_rollouts = NOT_SERVED not in why
            if self._serves_rollouts:
                return why
        payload = want_chunk(secrets.token_bytes(32))
        why = await self._request(CHUNKS_PROTOCOL, payload, CHUNK_BYTES_MAX)
        return "" if NOT_HERE in why else why

    async def _request(self, protocol: str, payload: bytes, most: int) -> str:
        """Make a request; what went wrong, or nothing."""
        try:
            if self._node not in self._transport.peers():
                await self._transport.connect(self._address, timeout_s=TIMEOUT_S)
            await self._transport.request(
                self._node, protocol, payload, timeout_s=TIMEOUT_S, response_bytes_max=most
            )
        except SwarmError as error:
            return str(error)[:100]
        return ""

    async def beat_on(self) -> None:
        """Greet now and then, as peers do."""
        while True:
            payload = hello(self._run_id, self._identity)
            await self._request(HELLO_PROTOCOL, payload, HELLO_REPLY_BYTES_MAX)
            await trio.sleep(HEARTBEAT_S)


async def greet(door: Door, run_id: str, source: str) -> str:
    """Come as a newcomer, from an address: why it was not let in and answered, or nothing."""
    identity = Identity.generate()
    try:
        with trio.fail_after(NEWCOMER_TIMEOUT_S):
            async with admitted(door, identity, source, Spent()) as mux:
                answer = await mux.request(HELLO_PROTOCOL, hello(run_id, identity))
                return "" if answer is not None else "refused"
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"[:100]
    except BaseExceptionGroup as group:
        return str(group)[:100]


async def newcomers(door: Door, run_id: str, network: str) -> None:
    """One after the other, each of another block."""

    async def come(source: str) -> None:
        began_s = time.monotonic()
        say("newcomer", began_s, await greet(door, run_id, source))

    number, due_s = 0, time.monotonic()
    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(come, f"{network}.{number % BLOCKS + 1}.7")
            number += 1
            due_s += NEWCOMER_EVERY_S
            await trio.sleep(max(0.0, due_s - time.monotonic()))


async def honest_peer(address: str, run_id: str, listen: str) -> None:
    """One honest peer, until cancelled."""
    identity = Identity.generate()
    async with (
        open_libp2p(identity, [listen], reach=ReachRules()) as transport,
        trio.open_nursery() as nursery,
    ):
        peer = HonestPeer(transport, identity, address, run_id)
        nursery.start_soon(peer.beat_on)
        nursery.start_soon(peer.ask_on)


async def main(address: str, run_id: str, network: str) -> None:
    """All of them, until the input ends."""
    host = address.split("/")[2]
    with suppress(BrokenPipeError):
        async with trio.open_nursery() as nursery:
            for _ in range(PEERS):
                nursery.start_soon(honest_peer, address, run_id, f"/ip4/{host}/tcp/0")
            nursery.start_soon(newcomers, Door.of(address), run_id, network)
            await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:4])
