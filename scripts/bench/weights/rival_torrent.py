"""One peer of a libtorrent swarm, for bench_weights_real.py; runs where libtorrent is.

    python rival_torrent.py seed tcp|utp|both FILE PIECE_BYTES TORRENT OWN_IP
    python rival_torrent.py leech tcp|utp|both DIRECTORY TORRENT OWN_IP PEER_IP...

There is no tracker, no hash table and no local discovery: a leecher dials the addresses that it is
given, those of all others, and peer exchange does the rest. Each prints `ready`, does nothing until
it reads a line, and prints `done` once all pieces are verified and on disk.
"""

import sys
import time
from pathlib import Path

import libtorrent  # type: ignore[import-not-found,unused-ignore]

PORT = 6881
POLL_S = 0.02
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


def _session(ip: str, protocol: str) -> "libtorrent.session":
    tcp, utp = PROTOCOLS[protocol]
    own = {"listen_interfaces": f"{ip}:{PORT}"}
    for way in ("incoming", "outgoing"):
        own |= {f"enable_{way}_tcp": tcp, f"enable_{way}_utp": utp}
    return libtorrent.session(SETTINGS | own)


def _make(file: Path, piece_bytes: int, torrent: Path) -> None:
    storage = libtorrent.file_storage()
    storage.add_file(file.name, file.stat().st_size)
    made = libtorrent.create_torrent(storage, piece_bytes, libtorrent.create_torrent.v1_only)
    libtorrent.set_piece_hashes(made, str(file.parent))
    torrent.write_bytes(libtorrent.bencode(made.generate()))


def _add(
    session: "libtorrent.session", directory: Path, torrent: Path
) -> "libtorrent.torrent_handle":
    parameters = libtorrent.add_torrent_params()
    parameters.ti = libtorrent.torrent_info(str(torrent))
    parameters.save_path = str(directory)
    return session.add_torrent(parameters)


def _seed(protocol: str, file: str, piece_bytes: str, torrent: str, ip: str) -> None:
    session = _session(ip, protocol)
    _make(Path(file), int(piece_bytes), Path(torrent))
    _await_seeding(_add(session, Path(file).parent, Path(torrent)))
    print("ready", flush=True)
    sys.stdin.readline()


def _leech(protocol: str, directory: str, torrent: str, ip: str, *peers: str) -> None:
    session = _session(ip, protocol)
    print("ready", flush=True)
    sys.stdin.readline()
    handle = _add(session, Path(directory), Path(torrent))
    for peer in peers:
        handle.connect_peer((peer, PORT))
    _await_seeding(handle)
    handle.flush_cache()
    print("done", flush=True)
    sys.stdin.readline()  # seeds meanwhile


def _await_seeding(handle: "libtorrent.torrent_handle") -> None:
    while not handle.status().is_seeding:
        time.sleep(POLL_S)


if __name__ == "__main__":
    {"seed": _seed, "leech": _leech}[sys.argv[1]](*sys.argv[2:])
