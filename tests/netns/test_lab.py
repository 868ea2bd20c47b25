"""Hosts in namespaces: what the shaper and the routers between them do to real packets."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.simulation.links import LinkProfile
from swarm.simulation.socket_lab import Home, Lab
from tests.integration.nodes import until
from tests.netns.peers import send, serve

pytestmark = pytest.mark.netns
OpenLab = Callable[..., Lab]
FAST = LinkProfile()
SIZE = 300_000


@contextmanager
def serving(lab: Lab, host: str) -> Iterator[None]:
    server = serve(lab, host)
    try:
        yield
    finally:
        server.kill()
        server.communicate()


def test_bytes_arrive_through_a_lossy_link(wan_sockets: OpenLab) -> None:
    bad = LinkProfile(latency_s=0.005, jitter_s=0.002, up_bytes_per_s=5e6, loss=0.02)
    lab = wan_sockets({"a": bad, "b": bad})
    with serving(lab, "a"):
        count, source, _ = send(lab, "b", lab.address("a"), SIZE)
    assert (int(count), source) == (SIZE, lab.address("b"))
    sent = lab.counters()["b"]
    assert sent["bytes"] > SIZE
    assert sent["packets"] > SIZE / 1500
    assert 0 < sent["lost"] < sent["packets"] / 2


def test_larger_packets_take_fewer(wan_sockets: OpenLab) -> None:
    packets = {}
    for mtu in (1500, 9000):
        lab = wan_sockets({"a": FAST, "b": FAST}, mtu=mtu)
        with serving(lab, "a"):
            count, _, _ = send(lab, "b", lab.address("a"), SIZE)
        assert int(count) == SIZE
        packets[mtu] = lab.counters()["b"]["packets"]
    assert packets[9000] < packets[1500] / 2


def test_cut_lets_nothing_through_until_healed(wan_sockets: OpenLab) -> None:
    lab = wan_sockets({"a": FAST, "b": FAST, "c": FAST})
    with serving(lab, "a"):
        lab.cut(["a"], ["b"])
        assert send(lab, "b", lab.address("a"), limit_s=1) == ["nothing"]
        assert lab.counters()["b"]["cut"] > 0
        assert send(lab, "c", lab.address("a"))[0] == "1"
        lab.heal()
        assert send(lab, "b", lab.address("a"))[0] == "1"


@pytest.mark.nat
def test_router_masquerades_and_lets_nobody_in(wan_sockets: OpenLab) -> None:
    homes = [
        Home("kept", FAST, ("k1", "k2")),
        Home("random", FAST, ("r",), symmetric=True),
    ]
    lab = wan_sockets({"out": FAST}, homes)
    with serving(lab, "out"), serving(lab, "k1"):
        # out: with the router's address, from the port that the host took
        assert send(lab, "k1", lab.address("out"), 7, 5555) == ["7", lab.address("kept"), "5555"]
        # a symmetric router takes others; that two drawn ports are both 5555 does not happen
        ports = [send(lab, "r", lab.address("out"), 7, 5555 + i)[2] for i in (0, 1)]
        assert ports != ["5555", "5556"]
        # in: neither to the router nor to the host behind it, but at home it answers
        assert send(lab, "out", lab.address("kept"), limit_s=1) == ["nothing"]
        assert send(lab, "k2", lab.address("k1"))[0] == "1"


def test_faults_in_a_plan_are_said(wan_sockets: OpenLab) -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        wan_sockets({"a": FAST}, [Home("h", FAST, ("a",))])
    with pytest.raises(ConfigError, match="at most 200"):
        wan_sockets({str(number): FAST for number in range(201)})


def test_what_the_machine_refuses_is_said(
    wan_sockets: OpenLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="ip is not installed"):
        wan_sockets({"a": FAST})


OWNER = """
import os, threading
from swarm.simulation.links import LinkProfile
from swarm.simulation.socket_lab import open_lab
with open_lab({"a": LinkProfile()}) as lab:
    inside = [lab.start("a", ["sleep", "1000"]) for _ in range(3)]  # the last is just on its way
    network = os.stat(lab.namespace("a")).st_ino
    print(network, *(child.pid for child in inside), flush=True)
    threading.Event().wait()
"""


def runs(pid: int) -> bool:
    """Whether a process that is not ours runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nothing_is_left_of_a_killed_owner() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    network, *inside = map(int, owner.stdout.readline().split())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: not any(runs(pid) for pid in inside), 30.0)
    until(lambda: network not in networks_in_use(), 30.0)


def networks_in_use() -> set[int]:
    """The network namespaces that processes are in."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                found.add((folder / "ns/net").stat().st_ino)
            except OSError:
                continue
    return found
