"""Nodes behind routers reach each other: over a relay, and then through both routers."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarm.identity import Identity
from swarm.simulation.links import LinkProfile
from swarm.simulation.socket_lab import Home, Lab

pytestmark = [pytest.mark.netns, pytest.mark.nat]
OpenLab = Callable[..., Lab]
HOME = LinkProfile(latency_s=0.01)
MIB = 1_048_576
TIMES = 4  # that are tried: on a busy machine both ends may dial too far apart


@dataclass
class Child:
    """One host of the lab. Its lines come in the order of events, so none is missed."""

    lab: Lab
    host: str
    letter: str
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.process: subprocess.Popen[str] = self.lab.start(
            self.host, [sys.executable, "-m", "tests.netns.reach_child", self.letter],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def peer_id(self) -> str:
        return Identity(self.letter.encode() * 32).peer_id

    def dial(self, address: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(address + "\n")
        self.process.stdin.flush()

    def until(self, condition: Callable[[], object]) -> None:
        """Read lines until something holds; a child that falls silent ends the test by its time."""
        assert self.process.stdout is not None
        while not condition():
            line = self.process.stdout.readline()
            assert line, f"{self.host} ended"
            self.state |= json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def relayed_address(self) -> str:
        return next((a for a in self.state["addresses"] if "/p2p-circuit/" in a), "")


Start = Callable[[Lab, str], Child]


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts children by host, and ends them with the test, however it ends."""
    with ExitStack() as stack:

        def start(lab: Lab, host: str) -> Child:
            child = Child(lab, host, host[0])
            stack.callback(child.end)
            child.until(lambda: child.state.get("addresses"))
            return child

        yield start


def reached(lab: Lab, started: Start) -> tuple[Child, Child]:
    """Two hosts behind routers, of which the second has dialled the first through a relay."""
    relay, hidden, other = (started(lab, host) for host in ("relay", "hidden", "other"))
    where = f"/ip4/{lab.address('relay')}/tcp/4001/p2p/{relay.peer_id}"
    for node in (hidden, other):
        node.dial(where)
        node.until(lambda node=node: node.state["reachable"] is False)  # type: ignore[misc]
    hidden.until(hidden.relayed_address)
    other.state.pop("answered", None)
    other.dial(hidden.relayed_address())
    other.until(lambda: "answered" in other.state or "failed" in other.state)
    assert other.state.get("answered") == MIB, other.state.get("failed")
    return hidden, other


def through_relay(lab: Lab, asker: Child, asked: Child) -> bool:
    """Whether a megabyte that one sends and gets back goes over the relay's link."""
    before = lab.counters()["relay"]["bytes"]
    asker.state.pop("answered")
    asker.dial(asked.relayed_address())
    asker.until(lambda: "answered" in asker.state)
    assert asker.state["answered"] == MIB
    return lab.counters()["relay"]["bytes"] - before >= MIB


def lab_of(wan_sockets: OpenLab, *, symmetric: bool) -> Lab:
    homes = [
        Home("router-h", HOME, ("hidden",), symmetric=symmetric),
        Home("router-o", HOME, ("other",), symmetric=symmetric),
    ]
    return wan_sockets({"relay": HOME}, homes)


def test_holes_are_punched_through_routers_that_keep_ports(
    wan_sockets: OpenLab, started: Start
) -> None:
    lab = lab_of(wan_sockets, symmetric=False)
    hidden, other = reached(lab, started)
    hidden.until(lambda: hidden.state["punched"] or hidden.state["punch_failures"] == TIMES)
    assert hidden.state["punched"] == 1
    hidden.until(lambda: hidden.state["peers"].get(other.peer_id) == lab.address("router-o"))
    other.until(lambda: other.state["peers"].get(hidden.peer_id) == lab.address("router-h"))
    assert not through_relay(lab, other, hidden)


def test_symmetric_routers_leave_two_nodes_on_the_relay(
    wan_sockets: OpenLab, started: Start
) -> None:
    lab = lab_of(wan_sockets, symmetric=True)
    hidden, other = reached(lab, started)
    hidden.until(lambda: hidden.state["punched"] or hidden.state["punch_failures"])
    assert hidden.state["punched"] == 0
    assert hidden.state["peers"][other.peer_id] is None, "still through the relay"
    assert through_relay(lab, other, hidden)
