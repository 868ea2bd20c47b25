"""A machine that has no run file joins by the line that a node printed."""

from pathlib import Path

import pytest

from swarm.identity import Identity
from tests.integration.nodes import LOOPBACK, MakeNode, NodeProcess, swarm_node
from tests.integration.test_join import peer_id, refused


def joined(make_node: MakeNode, name: str, run: str, *flags: str) -> NodeProcess:
    node = make_node(name, *flags)
    node.run_file = Path(run) if run else None
    return node.start()


def test_an_address_leads_into_the_run_of_its_node(make_node: MakeNode) -> None:
    first = make_node("a").start()
    address = first.address()
    run_id = first.until(first.status).run_id
    second = joined(make_node, "b", "", "--peer", address)  # nobody is at a terminal
    second_id = peer_id(second)
    first.until(lambda: second_id in {peer.peer_id for peer in first.until(first.status).peers})
    assert second.until(second.status).run_id == run_id
    said = second.said()
    assert f"that node's run:\n  {run_id}: 1 node, " in said
    assert "tasks: scripted_sum" in said
    assert first.until(first.status).rejected == {}
    first.kill()
    assert second.interrupt() == 0
    second.start()  # the same command, and nobody answers
    assert second.until(second.status).run_id == run_id
    assert "going on in the run of the last start" in second.said()


def test_an_address_without_an_answer_starts_nothing(tmp_path: Path) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    refused(
        swarm_node("join", "--peer", nobody, "--data-dir", tmp_path / "a"),
        "which run is it?",
        nobody,
        "--run",
    )


@pytest.mark.long
def test_the_printed_link_is_enough_and_other_rules_are_refused(
    make_node: MakeNode, tmp_path: Path
) -> None:
    first = make_node("a").start()
    address = first.address()
    run_id = first.until(first.status).run_id
    link = f"{address}/run/{run_id}"
    first.until(lambda: f"  swarm-node join {link}\n" in first.said())
    assert (
        f"  swarm-node join {link}\n" in swarm_node("status", "--data-dir", tmp_path / "a").stdout
    )
    second = joined(make_node, "b", "", link)
    second_id = peer_id(second)
    first.until(lambda: second_id in {peer.peer_id for peer in first.until(first.status).peers})
    assert f"{peer_id(first)} handed on the rules of run {run_id}" in second.said()
    assert second.until(second.status).run_id == run_id
    other_link = f"{address}/run/sums-00000000000000000000000000000000"
    other = ["join", "--listen", LOOPBACK, "--data-dir", tmp_path / "c"]
    refused(
        swarm_node(*other, "--run", "sums-00000000000000000000000000000000"),
        "--run sums-00000000000000000000000000000000",
        "--peer",
    )
    refused(swarm_node(*other, "--peer", other_link), "sums-000000", f"of run {run_id}")
    refused(swarm_node(*other, link[:-1]), "no whole link")
    refused(swarm_node(*other, link, "--run", "demo"), run_id, "leave --run out")
    refused(swarm_node(*other, link, "--peer", other_link), "differ in run")
    nobody = other_link.replace(address.split("/")[4], "1", 1)
    refused(swarm_node(*other, nobody), "sums-00000000000000000000000000000000", "nobody handed")


@pytest.mark.long
def test_an_invitation_to_a_private_swarm_brings_the_rules(make_node: MakeNode) -> None:
    first = make_node("a", "--private").start()
    first.address()
    invitation = swarm_node("invite", "--data-dir", first.data_dir).stdout.strip()
    run_id = first.until(first.status).run_id
    second = joined(make_node, "b", run_id, "--invite", invitation)
    second_id = peer_id(second)
    first.until(lambda: second_id in {peer.peer_id for peer in first.until(first.status).peers})
    rules = second.data_dir / "runs" / f"{run_id}.json"
    assert rules.stat().st_mode & 0o077 == 0
    stopped = second.process
    stopped.terminate()
    stopped.wait()
    second.start()  # the rules are here now
    assert second.until(second.status).run_id == run_id
    assert second.said().count("handed on the rules") == 1
