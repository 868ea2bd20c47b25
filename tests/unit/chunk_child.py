"""Puts chunks into a store until it is killed: `python -m tests.unit.chunk_child DIRECTORY FIRST`.

The hash of each chunk is printed once it is stored. Chunk n is the number n, over and over.
"""

import hashlib
import sys
from pathlib import Path

from swarm.weights.chunks import ChunkStore

CHUNK_BYTES = 1 << 22
CHUNKS_MAX = 50


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (CHUNK_BYTES // 8)


def main(directory: str, first: int) -> None:
    with ChunkStore(Path(directory), 1 << 40) as store:
        for number in range(first, first + CHUNKS_MAX):
            data = content(number)
            sha256 = hashlib.sha256(data).digest()
            store.put(sha256, data)
            sys.stdout.write(f"{sha256.hex()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
