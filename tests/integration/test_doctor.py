"""`swarm-node doctor` on this machine, with a peer beside it."""

import secrets
from pathlib import Path
from random import Random

import pytest
import trio

from node import doctor
from node.config import NodeConfig
from node.doctor import Finding, check_addresses, check_clock, check_congestion, examine_network
from node.simulated import EPOCH_S
from swarm.address_book import AddressBook
from swarm.discovery import Discovery
from swarm.identity import Identity
from swarm.ledger import Ledger
from swarm.transport import libp2p_reach
from swarm.transport.libp2p_host import open_libp2p
from swarm.transport.libp2p_reach import ReachRules
from swarm.warden import Warden
from tests.integration.nodes import LOOPBACK, swarm_node
from tests.support import run
from tests.unit.tasks_support import make_run

pytestmark = pytest.mark.integration

RUN = make_run()
BEN = Identity(b"b" * 32)


def settings(data_dir: Path, **more: object) -> NodeConfig:
    return NodeConfig(run=RUN, data_dir=data_dir, listen=(LOOPBACK,), **more)  # type: ignore[arg-type]


def examined(config: NodeConfig, clock_error_s: float = 0.0) -> dict[str, Finding]:
    """What the doctor finds with one node of the run beside it."""
    findings: list[Finding] = []

    def now_s() -> float:
        return EPOCH_S + trio.current_time()

    async def main() -> None:
        async with (
            open_libp2p(BEN, [LOOPBACK], reach=ReachRules()) as host,
            trio.open_nursery() as nursery,
        ):
            node = Discovery(
                RUN.run_id, "test", BEN, secrets.token_bytes(16), host, (), AddressBook(),
                Warden(host, Ledger()), now_s=now_s, rng=Random(1),
                run_sync=trio.to_thread.run_sync,
            )  # fmt: skip
            nursery.start_soon(node.run)
            asked = config.model_copy(update={"peers": host.addresses()})
            await examine_network(asked, findings.append, lambda: now_s() + clock_error_s)
            nursery.cancel_scope.cancel()

    run(main)
    return {finding.check: finding for finding in findings}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_reach, "TICK_S", 0.1)


def test_with_a_peer_it_tells_the_time_and_who_can_dial_us(tmp_path: Path) -> None:
    found = examined(settings(tmp_path))
    assert {name: finding.level for name, finding in found.items()} == {
        "listening": "ok", "addresses": "warn", "local discovery": "?", "UPnP": "?",
        "peers": "ok", "clock": "ok", "reachability": "ok", "relay": "ok", "hole punching": "ok",
    }  # fmt: skip


def test_a_clock_that_is_wrong_is_a_fault(tmp_path: Path) -> None:
    found = examined(settings(tmp_path), clock_error_s=-3600)
    assert found["clock"].level == "fail"
    assert "behind" in found["clock"].text


def test_where_the_port_is_closed_it_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "PEERS_WAIT_S", 3.0)
    monkeypatch.setattr(libp2p_reach.Reach, "_ports", lambda self: (1,))
    found = examined(settings(tmp_path))
    assert found["reachability"].level == "warn"
    assert "announce" in found["reachability"].advice
    assert found["relay"].level == "warn", "the peer cannot be dialled either"


def test_a_peer_that_is_not_there_is_a_fault_and_the_exit_status(tmp_path: Path) -> None:
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{BEN.peer_id}"
    done = swarm_node("doctor", "--data-dir", tmp_path, "--listen", LOOPBACK, "--peer", gone)
    assert done.returncode == 1, done.stderr
    assert "fail  peers: 0 of 1" in done.stdout
    alone = swarm_node("doctor", "--data-dir", tmp_path, "--listen", LOOPBACK)
    assert alone.returncode == 0
    assert alone.stdout.splitlines()[-1] == "a node would work here"
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_what_it_says_of_addresses_clocks_and_the_kernel(tmp_path: Path) -> None:
    assert check_addresses(["/ip4/8.8.8.8/tcp/1"], ()).level == "ok"
    assert check_addresses(["/ip4/100.64.3.4/tcp/1"], ()).level == "warn"
    assert check_addresses(["/ip4/127.0.0.1/tcp/1"], ()).level == "warn"
    assert check_addresses(["/ip4/127.0.0.1/tcp/1"], ["/dns/me.example/tcp/1"]).level == "ok"
    levels = [check_clock([ahead], 120).level for ahead in (0.0, 61.0, -119.0, 121.0, -121.0)]
    assert levels == ["ok", "warn", "warn", "fail", "fail"]
    assert check_clock([], 120).level == "?"
    kernel = tmp_path / "congestion"
    assert check_congestion(settings(tmp_path), kernel).level == "?"
    for name, level in (("bbr", "ok"), ("reno", "warn")):
        kernel.write_text(name + "\n")
        assert check_congestion(settings(tmp_path), kernel).level == level
