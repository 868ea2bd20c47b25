"""The hostile peer of a soak: takes leases, hands in nonsense, and floods a little, for ever.

    python -m tests.hostile.soak_peer RUN_FILE LEARNER_ADDRESS NODE_ADDRESS

It takes a new key whenever it is cut off, and makes a few requests a second.
"""

import secrets
import sys
from contextlib import suppress

import trio

from swarm.wire import codec
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    HELLO_PROTOCOL,
    LEASE_REPLY_BYTES_MAX,
    LEASES_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    SUBMISSIONS_PROTOCOL,
    LeaseReply,
)
from tests.hostile.attack import OFTEN, Assault, connected
from tests.hostile.attacks.exchange import recent_adverts
from tests.hostile.messages import hello, load_run, spoiled, want, want_lease
from tests.hostile.wire import Door, Mux

PAUSE_S = 2.0
BURST = 30  # requests of a little flood
NETWORK = "127.9"


async def take_and_spoil(run_id: str, mux: Mux) -> None:
    """Ask for leases; hand in nonsense for every other one, and nothing for the rest."""
    for number in range(OFTEN):
        answer = await mux.request(LEASES_PROTOCOL, want_lease(run_id, 1))
        if answer is not None and number % 2:
            lease = codec.decode(answer, LeaseReply, LEASE_REPLY_BYTES_MAX)
            for _ in range(lease.groups):
                await mux.request(SUBMISSIONS_PROTOCOL, spoiled(mux.key, lease.lease, 400))
        await trio.sleep(PAUSE_S)


async def flood(run_id: str, mux: Mux) -> None:
    """Ask in bursts for what every peer may ask now and then."""
    while True:
        asks = (
            (ADVERTS_PROTOCOL, recent_adverts(run_id)),
            (ROLLOUTS_PROTOCOL, want(run_id)),
            (HELLO_PROTOCOL, hello(run_id, mux.key)),
            (HELLO_PROTOCOL, secrets.token_bytes(64)),
        )
        for number in range(BURST):
            await mux.request(*asks[number % len(asks)])
        await trio.sleep(PAUSE_S)


async def main(run_file: str, learner: str, node: str) -> None:
    """Attack the learner and a node, side by side."""
    run_id = load_run(run_file).run_id
    async with trio.open_nursery() as nursery:
        for address, use in ((learner, take_and_spoil), (node, flood)):
            assault = Assault(use.__name__, Door.of(address), run_id, 0.0, NETWORK)
            nursery.start_soon(connected, assault, 1, lambda mux, use=use: use(run_id, mux), 0.5)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        trio.run(main, *sys.argv[1:4])
