"""A program that looks like a node from outside, for tests of the demo: it answers on the real
status socket and writes a real event log, and does nothing else.

    demo_node.py <data dir> <address to tell> <behaviour: well|fails|stuck> <rounds>
"""

import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import trio

from node.observe.event_log import FILE_NAME, EventLog
from node.observe.status import serve_status
from tests.unit.monitor_records import PEER_A, PEER_B, held_out, round_done, snapshot, started


async def main(data_dir: Path, address: str, behaviour: str, rounds: int) -> int:
    leaving = trio.Event()

    async def watch_signals() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if behaviour != "stuck":
                    leaving.set()

    async def live() -> None:
        with EventLog(data_dir / FILE_NAME, trio.current_time) as log:
            log.write(started(PEER_A))
            log.write(held_out(0, 0.4))
            for number in range(1, rounds + 1):
                log.write(round_done(number, foreign_by_producer={PEER_B: 2}))
                await trio.sleep(0.02)
            log.write(held_out(rounds, 0.6))
        if behaviour == "well":
            leaving.set()

    if behaviour == "fails":
        sys.stderr.write("\x1b[31mno such policy\n")
        return 3
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_signals)
        answer = partial(snapshot, addresses=(address,))
        await nursery.start(serve_status, data_dir, answer, Counter())
        nursery.start_soon(live)
        await leaving.wait()
        nursery.cancel_scope.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(trio.run(main, Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
