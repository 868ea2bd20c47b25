"""Small programs for hosts of a lab: plain TCP, so that they start in no time."""

import subprocess
import sys
from typing import Any

from swarm.simulation.socket_lab import Lab

PORT = 4001
_SERVER = """
import socket
with socket.create_server(("0.0.0.0", {port})) as server:
    print("listening", flush=True)
    while True:
        client, source = server.accept()
        with client:
            count = 0
            while more := client.recv(1 << 20):
                count += len(more)
            client.sendall(f"{{count}} {{source[0]}} {{source[1]}}".encode())
"""
_CLIENT = """
import socket, sys
host, port, size, local, limit = sys.argv[1], *map(int, sys.argv[2:])
with socket.socket() as client:
    client.settimeout(limit)
    client.bind(("0.0.0.0", local))
    try:
        client.connect((host, port))
        client.sendall(b"x" * size)
        client.shutdown(socket.SHUT_WR)
        print(client.recv(99).decode())
    except TimeoutError:
        print("nothing")
"""


def serve(lab: Lab, host: str) -> "subprocess.Popen[str]":
    """A host that says how much it got, and from where; it ends with the lab."""
    program = _SERVER.format(port=PORT)
    server: subprocess.Popen[str] = lab.start(
        host, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def send(
    lab: Lab, host: str, address: str, size: int = 1, local_port: int = 0, limit_s: int = 30
) -> list[str]:
    """Send bytes to a server: what it says (count, address and port it saw), or "nothing"."""
    arguments: list[Any] = [address, PORT, size, local_port, limit_s]
    command = lab.command(host, [sys.executable, "-c", _CLIENT, *map(str, arguments)])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
