"""`swarm-node doctor` on this machine, with a peer beside it."""

import re
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from node.commands import doctor
from node.commands.doctor import (
    Finding,
    check_addresses,
    check_broker,
    check_clock,
    check_congestion,
    check_model,
    check_tasks,
    examine_network,
    usual_tokens,
)
from node.config import NodeConfig
from node.interfaces.trainer_spec import TrainerSpec
from node.simulation.simulated_nodes import EPOCH_S
from swarm.identity import Identity
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.discovery import Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.transport.libp2p import reachability
from swarm.transport.libp2p.host import open_libp2p
from swarm.transport.libp2p.reachability import ReachRules
from tests.brokers import PASSWORD, USER, free_port, open_mosquitto
from tests.integration.nodes import LOOPBACK, swarm_node
from tests.support import run
from tests.unit.tasks_support import make_run
from tests.unit.training_support import qwen_directory

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
                NodeInfo(RUN.run_id, "test", BEN, secrets.token_bytes(16)),
                (),
                AddressBook(),
                ConnectionGater(host, Ledger()),
                now_s=now_s,
                rng=Random(1),
                run_sync=trio.to_thread.run_sync,
            )
            nursery.start_soon(node.run)
            asked = config.model_copy(update={"peers": host.addresses()})
            await examine_network(asked, findings.append, lambda: now_s() + clock_error_s)
            nursery.cancel_scope.cancel()

    run(main)
    return {finding.check: finding for finding in findings}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "TICK_S", 0.1)


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
    monkeypatch.setattr(reachability.Reachability, "_ports", lambda self: (1,))
    found = examined(settings(tmp_path))
    assert found["reachability"].level == "warn"
    assert "announce" in found["reachability"].advice
    assert found["relay"].level == "warn", "the peer cannot be dialled either"


@pytest.mark.long
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


def asked(config: NodeConfig, password: str | None = None) -> Finding:
    """What it says of the broker."""

    async def main() -> Finding:
        return await check_broker(config, password, Random(1))

    return trio.run(main)


def test_a_broker_that_is_away_or_named_wrongly_is_told(tmp_path: Path) -> None:
    assert asked(settings(tmp_path)).level == "ok"
    away = asked(settings(tmp_path, telemetry=f"mqtt://127.0.0.1:{free_port()}"))
    assert away.level == "warn"
    assert "refused" in away.text
    no_tls = asked(settings(tmp_path, telemetry_ca=tmp_path / "ca.pem"))
    assert no_tls.level == "fail"


@pytest.mark.broker
def test_a_broker_that_answers_is_no_fault_and_one_that_refuses_is(tmp_path: Path) -> None:
    with open_mosquitto(tmp_path / "open") as mosquitto:
        url = f"mqtt://127.0.0.1:{mosquitto.port}"
        assert asked(settings(tmp_path, telemetry=url)).level == "ok"
    with open_mosquitto(tmp_path / "closed", users=True) as mosquitto:
        url = f"mqtt://{USER}@127.0.0.1:{mosquitto.port}"
        assert asked(settings(tmp_path, telemetry=url), PASSWORD).level == "ok"
        wrong = asked(settings(tmp_path, telemetry=url), "wrong")
        assert wrong.level == "warn"
        assert "wrong" not in wrong.text


def test_a_run_whose_tasks_cannot_be_made_is_told(tmp_path: Path) -> None:
    found = run(partial(check_tasks, settings(tmp_path)))
    assert (found.level, found.text) == ("ok", "run test: its environment makes tasks")
    wrong = {"name": "chain_sum", "parameters": {"min_terms": 5, "max_terms": 2}}
    found = run(partial(check_tasks, NodeConfig(run=make_run(wrong), data_dir=tmp_path)))
    assert found.level == "fail"
    assert "max_terms must be >= min_terms; correct its parameters" in found.text


@pytest.mark.long
def test_a_model_that_cannot_be_read_or_does_not_fit_is_told(tmp_path: Path) -> None:
    model = qwen_directory(tmp_path / "model")
    config = settings(tmp_path, model=str(model))
    spec = TrainerSpec(str(model), threads=1)
    fits = check_model(config, spec)
    assert fits.level == "ok"
    few = settings(tmp_path, model=str(model), local_groups=1, external_groups=0, group_size=2)
    assert usual_tokens(few) < usual_tokens(config)
    told = re.search(
        r"training takes about (\S+) (.B), at most (\S+) (.B); ", check_model(few, spec).text
    )
    assert told is not None
    usual, unit, most, unit_of_most = told.groups()
    assert (unit != unit_of_most) or float(usual) < float(most)
    small = check_model(config, replace(spec, memory_bytes_max=100_000_000))
    assert small.level == "fail"
    assert "take a smaller model" in small.text
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    broken = check_model(config, spec)
    assert broken.level == "fail"
    assert "fetch or copy it again" in broken.text
    (model / "config.json").write_text("{}")
    assert check_model(config, spec).level == "fail"
    assert check_model(config, None).level == "?"
