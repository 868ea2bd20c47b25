"""One origin for all, for bench_weights_real.py: the standard library's threaded server.

    python rival_http.py serve DIRECTORY
    python rival_http.py get URL SHA256 FILE

Each prints `ready`, does nothing until it reads a line, and a client prints `done` once the file is
on disk with the right hash.
"""

import hashlib
import sys
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

PORT = 8080
READ_BYTES = 1 << 20


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def _serve(directory: str) -> None:
    server = ThreadingHTTPServer(("0.0.0.0", PORT), partial(_Quiet, directory=directory))
    Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()


def _get(url: str, sha256: str, path: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    digest = hashlib.sha256()
    with urllib.request.urlopen(url) as answer, open(path, "wb") as file:
        while piece := answer.read(READ_BYTES):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != sha256:
        sys.exit("another file than was published")
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _get(*sys.argv[2:])
