"""The hostile peer of a soak: takes leases, hands in nonsense, and floods a little, for ever.

    python soak_hostile.py RUN_FILE LEARNER_ADDRESS NODE_ADDRESS

It takes a new key whenever it is cut off. Bounded in rate: a few requests a second.
"""

import os
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path

import trio
from siege_messages import hello, want
from siege_wire import FAILURES, Door, Mux, Spent, admitted

from node.config import load_config
from swarm.identity import Identity
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    GROUP_DOMAIN,
    HELLO_PROTOCOL,
    LEASE_REPLY_BYTES_MAX,
    LEASES_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    SUBMISSIONS_PROTOCOL,
    LeaseReply,
    RecentAdverts,
    Signed,
    Submission,
    WantLease,
)

PAUSE_S = 2.0
BURST = 30  # requests of a little flood
ANSWER_S = 10.0
SOURCE = "127.9.1.1"


def nonsense(identity: Identity, lease: bytes) -> bytes:
    """A submission whose signature holds, and nothing else does."""
    payload = secrets.token_bytes(400)
    record = codec.encode(
        Signed(
            payload=payload,
            signer=identity.peer_id,
            signature=identity.sign(GROUP_DOMAIN, payload),
        )
    )
    return codec.encode(Submission(type="submission", lease=lease, record=record))


async def take_and_spoil(mux: Mux, identity: Identity, run_id: str, number: int) -> None:
    """Ask for a lease; hand in nonsense for every other one, and nothing for the rest."""
    wanted = codec.encode(WantLease(type="want_lease", run_id=run_id, version=1))
    answer = await mux.request(LEASES_PROTOCOL, wanted, ANSWER_S)
    if answer is None:
        return
    lease = codec.decode(answer, LeaseReply, LEASE_REPLY_BYTES_MAX)
    for _ in range(lease.groups if number % 2 else 0):
        await mux.request(SUBMISSIONS_PROTOCOL, nonsense(identity, lease.lease), ANSWER_S)


async def flood(mux: Mux, identity: Identity, run_id: str) -> None:
    """A burst of what every peer may ask now and then."""
    wants = (
        (ADVERTS_PROTOCOL, codec.encode(RecentAdverts(type="recent_adverts", run_id=run_id))),
        (ROLLOUTS_PROTOCOL, want(run_id)),
        (HELLO_PROTOCOL, hello(run_id, identity)),
        (HELLO_PROTOCOL, secrets.token_bytes(64)),
    )
    for number in range(BURST):
        await mux.request(*wants[number % len(wants)], ANSWER_S)


async def one_life(door: Door, run_id: str, spoil: bool) -> None:
    """Under one key, until cut off."""
    identity = Identity.generate()
    async with admitted(door, identity, SOURCE, Spent()) as mux:
        for number in range(1_000):
            if mux.over.is_set():
                return
            if spoil:
                await take_and_spoil(mux, identity, run_id, number)
            else:
                await flood(mux, identity, run_id)
            await trio.sleep(PAUSE_S)


async def on_and_on(door: Door, run_id: str, spoil: bool) -> None:
    """One key after the other."""
    while True:
        try:
            await one_life(door, run_id, spoil)
        except FAILURES:
            pass
        except BaseExceptionGroup as group:
            if group.split(FAILURES)[1] is not None:
                raise
        await trio.sleep(PAUSE_S)


async def main(run_file: str, learner: str, node: str) -> None:
    """Both, side by side."""
    run_id = load_config({}, {}, Path(run_file)).run.run_id
    print(f"{time.strftime('%T')} hostile, process {os.getpid()}", flush=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(on_and_on, Door.of(learner), run_id, True)
        nursery.start_soon(on_and_on, Door.of(node), run_id, False)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        trio.run(main, *sys.argv[1:4])
