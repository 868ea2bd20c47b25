"""One host of a shardcast network, for bench_weights_real.py; runs where shardcast is.

    python rival_shardcast.py origin FILE DIRECTORY SHARD_BYTES
    python rival_shardcast.py middle UPSTREAM_URL DIRECTORY
    python rival_shardcast.py client DIRECTORY URL...

The origin prints `ready` and cuts and announces the file when it reads a line, and prints
`announced`. The others look for a version all the time, once a second; a client prints `done` once
the file is put together with the right checksum.
"""

import sys
import time
from pathlib import Path

PORT = 8000
LOOK_S = 1.0  # a middle node's default is 30, a client of prime-rl had 5
PROBE = "data1.bin"  # which clients fetch at first, to measure servers
PROBE_BYTES = 1 << 16


def _origin(file: str, directory: str, shard_bytes: int) -> None:
    from shardcast import OriginServer

    (Path(directory) / PROBE).write_bytes(bytes(PROBE_BYTES))
    origin = OriginServer(directory, PORT)
    print("ready", flush=True)
    sys.stdin.readline()
    origin.broadcast(file, shard_bytes)
    print("announced", flush=True)
    sys.stdin.readline()


def _middle(upstream: str, directory: str) -> None:
    from shardcast import MiddleNode

    (Path(directory) / PROBE).write_bytes(bytes(PROBE_BYTES))
    MiddleNode([upstream], directory, PORT, check_interval=LOOK_S)  # type: ignore[arg-type,unused-ignore]
    print("ready", flush=True)
    sys.stdin.readline()


def _client(directory: str, *urls: str) -> None:
    from shardcast import ClientNode

    client = ClientNode(list(urls), directory)
    print("ready", flush=True)
    sys.stdin.readline()
    while not (versions := _versions(client)):
        time.sleep(LOOK_S)
    if client.download_version(max(versions)) is None:
        sys.exit("shardcast gave up")
    print("done", flush=True)
    sys.stdin.readline()


def _versions(client: object) -> dict[str, str]:
    return client.list_available_versions()  # type: ignore[attr-defined,no-any-return]


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "origin":
        _origin(rest[0], rest[1], int(rest[2]))
    elif role == "middle":
        _middle(*rest)
    else:
        _client(*rest)
