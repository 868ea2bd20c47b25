"""One host of another way to bring a file to all, for bench_weights_real.py.

    python rival_host.py seed tcp|utp|both FILE PIECE_BYTES TORRENT OWN_IP
    python rival_host.py leech tcp|utp|both DIRECTORY TORRENT OWN_IP PEER_IP...
    python rival_host.py origin FILE DIRECTORY SHARD_BYTES
    python rival_host.py middle UPSTREAM_URL DIRECTORY
    python rival_host.py client DIRECTORY URL...
    python rival_host.py serve DIRECTORY
    python rival_host.py get URL SHA256 FILE

The first two are of libtorrent, the next three of shardcast, the last two of HTTP by the standard
library's threaded server; each runs where its library is. All print `ready` and wait for a line. A
receiver prints `done` once the file is verified and on disk, an origin `announced`.

libtorrent has no tracker, hash table or local discovery: a leecher dials the addresses that it is
given, those of all others. Clients of shardcast look for a version once a second.
"""

import hashlib
import sys
import time
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

TORRENT_PORT, SHARDCAST_PORT, HTTP_PORT = 6881, 8000, 8080
POLL_S = 0.02
LOOK_S = 1.0  # a middle node's default is 30, a client of prime-rl had 5
PROBE, PROBE_BYTES = "data1.bin", 1 << 16  # clients fetch it at first, to measure servers
READ_BYTES = 1 << 20
# Defaults of libtorrent 2 otherwise: no rate limits, eight unchoked peers, which here is everybody.
SETTINGS = {
    "user_agent": "bench",
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "allow_multiple_connections_per_ip": False,
    "alert_mask": 0,
}
PROTOCOLS = {"tcp": (True, False), "utp": (False, True), "both": (True, True)}


def say(word: str) -> None:
    """Print a word, and wait for a line."""
    print(word, flush=True)
    sys.stdin.readline()


def _session(ip: str, protocol: str) -> Any:
    import libtorrent  # type: ignore[import-not-found,unused-ignore]

    tcp, utp = PROTOCOLS[protocol]
    own = {"listen_interfaces": f"{ip}:{TORRENT_PORT}"}
    for way in ("incoming", "outgoing"):
        own |= {f"enable_{way}_tcp": tcp, f"enable_{way}_utp": utp}
    return libtorrent.session(SETTINGS | own)


def _add(session: Any, directory: Path, torrent: str) -> Any:
    import libtorrent

    parameters = libtorrent.add_torrent_params()
    parameters.ti = libtorrent.torrent_info(torrent)
    parameters.save_path = str(directory)
    return session.add_torrent(parameters)


def _await_seeding(handle: Any) -> None:
    while not handle.status().is_seeding:
        time.sleep(POLL_S)


def seed(protocol: str, file: str, piece_bytes: str, torrent: str, ip: str) -> None:
    import libtorrent

    session, path = _session(ip, protocol), Path(file)
    storage = libtorrent.file_storage()
    storage.add_file(path.name, path.stat().st_size)
    made = libtorrent.create_torrent(storage, int(piece_bytes), libtorrent.create_torrent.v1_only)
    libtorrent.set_piece_hashes(made, str(path.parent))
    Path(torrent).write_bytes(libtorrent.bencode(made.generate()))
    _await_seeding(_add(session, path.parent, torrent))
    say("ready")


def leech(protocol: str, directory: str, torrent: str, ip: str, *peers: str) -> None:
    session = _session(ip, protocol)
    say("ready")
    handle = _add(session, Path(directory), torrent)
    for peer in peers:
        handle.connect_peer((peer, TORRENT_PORT))
    _await_seeding(handle)
    handle.flush_cache()
    say("done")  # seeds meanwhile


def origin(file: str, directory: str, shard_bytes: str) -> None:
    from shardcast import OriginServer

    (Path(directory) / PROBE).write_bytes(bytes(PROBE_BYTES))
    server = OriginServer(directory, SHARDCAST_PORT)
    say("ready")
    server.broadcast(file, int(shard_bytes))
    say("announced")


def middle(upstream: str, directory: str) -> None:
    from shardcast import MiddleNode

    (Path(directory) / PROBE).write_bytes(bytes(PROBE_BYTES))
    MiddleNode([upstream], directory, SHARDCAST_PORT, check_interval=LOOK_S)  # type: ignore[arg-type,unused-ignore]
    say("ready")


def client(directory: str, *urls: str) -> None:
    from shardcast import ClientNode

    node = ClientNode(list(urls), directory)
    say("ready")
    while not (versions := node.list_available_versions()):
        time.sleep(LOOK_S)
    if node.download_version(max(versions)) is None:
        sys.exit("shardcast gave up")
    say("done")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def serve(directory: str) -> None:
    server = ThreadingHTTPServer(("0.0.0.0", HTTP_PORT), partial(_Quiet, directory=directory))
    Thread(target=server.serve_forever, daemon=True).start()
    say("ready")


def get(url: str, sha256: str, path: str) -> None:
    say("ready")
    digest = hashlib.sha256()
    with urllib.request.urlopen(url) as answer, open(path, "wb") as file:
        while piece := answer.read(READ_BYTES):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != sha256:
        sys.exit("another file than was published")
    say("done")


ROLES = (seed, leech, origin, middle, client, serve, get)

if __name__ == "__main__":
    {role.__name__: role for role in ROLES}[sys.argv[1]](*sys.argv[2:])
