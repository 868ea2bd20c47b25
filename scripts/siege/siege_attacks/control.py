"""No attack at all: what it costs honest peers that a process of low priority computes beside them.

Where its row misses a goal, the machine is too small or too busy for the other rows to say much.
"""

import trio

from siege_attacks import Assault, attack


@attack("control", "nothing is sent", "one core at low priority", alone=True)
async def computes_beside_it(assault: Assault) -> None:
    """Spin."""
    until_s = trio.current_time() + assault.seconds
    while trio.current_time() < until_s:
        sum(range(200_000))
        await trio.lowlevel.checkpoint()
