"""A machine that has no run file joins by the line that a node printed."""

import re
from pathlib import Path

import pytest

from tests.integration.nodes import LOOPBACK, MakeNode, NodeProcess, swarm_node
from tests.integration.test_join import peer_id, refused


def joined(make_node: MakeNode, name: str, run: str, *flags: str) -> NodeProcess:
    node = make_node(name, *flags)
    node.run_file = Path(run)
    return node.start()


@pytest.mark.long
def test_the_printed_line_is_enough_and_other_rules_are_refused(
    make_node: MakeNode, tmp_path: Path
) -> None:
    first = make_node("a").start()
    address = first.address()
    run_id = first.until(first.status).run_id
    line = first.until(lambda: re.search(r"swarm-node join --peer \S+ --run (\S+)", first.said()))
    assert line[1] == run_id
    second = joined(make_node, "b", run_id, "--peer", address)
    second_id = peer_id(second)
    first.until(lambda: second_id in {peer.peer_id for peer in first.until(first.status).peers})
    assert f"{peer_id(first)} handed on the rules of run {run_id}" in second.said()
    assert second.until(second.status).run_id == run_id
    other = ["join", "--run", "sums-00000000000000000000000000000000", "--data-dir", tmp_path / "c"]
    refused(
        swarm_node(*other, "--listen", LOOPBACK),
        "--run sums-00000000000000000000000000000000",
        "--peer",
    )
    refused(
        swarm_node(*other, "--peer", address),
        "sums-00000000000000000000000000000000",
        f"of run {run_id}",
    )
    nobody = address.replace(address.split("/")[4], "1", 1)
    refused(
        swarm_node(*other, "--peer", nobody),
        "sums-00000000000000000000000000000000",
        "nobody handed",
    )


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
