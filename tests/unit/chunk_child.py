"""Puts chunks into a store until it dies: `python -m tests.unit.chunk_child DIRECTORY FIRST`.

The hash of each chunk is printed once it is stored. Chunk n is the number n, over and over. With a
third argument, the kernel ends the process in the middle of a write after that many chunks.
"""

import hashlib
import resource
import signal
import sys
from pathlib import Path

from swarm.weights.chunk_store import ChunkStore

CHUNK_BYTES = 1 << 22
CHUNKS_MAX = 50


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (CHUNK_BYTES // 8)


def die_in_the_next_write() -> None:
    """The kernel takes half a chunk, and ends the process at the other half: none of it runs on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES // 2, CHUNK_BYTES // 2))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def main(directory: str, first: int, whole: int = CHUNKS_MAX) -> None:
    with ChunkStore(Path(directory), 1 << 40) as store:
        for number in range(first, first + CHUNKS_MAX):
            if number == first + whole:
                die_in_the_next_write()
            data = content(number)
            sha256 = hashlib.sha256(data).digest()
            store.put(sha256, data)
            sys.stdout.write(f"{sha256.hex()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
