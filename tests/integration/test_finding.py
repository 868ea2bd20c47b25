"""Membership over real sockets."""

import secrets
from pathlib import Path
from random import Random

import pytest
import trio

from node.simulation.simulated_nodes import EPOCH_S
from swarm.identity import Identity
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.discovery import Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ANN, BEN, CAT = (Identity(letter * 32) for letter in (b"a", b"b", b"c"))


def member(
    identity: Identity, transport: Libp2pTransport, bootstrap: tuple[str, ...], book: AddressBook
) -> Discovery:
    return Discovery(
        NodeInfo("sums-1", "test", identity, secrets.token_bytes(16)),
        bootstrap,
        book,
        ConnectionGater(transport, Ledger()),
        now_s=lambda: EPOCH_S + trio.current_time(),
        rng=Random(1),
        run_sync=trio.to_thread.run_sync,
    )


async def until_known(node: Discovery, *identities: Identity) -> None:
    with trio.fail_after(30):
        while not {identity.peer_id for identity in identities} <= set(node.peers):  # noqa: ASYNC110
            await trio.sleep(0.05)


def test_without_its_bootstrap_peer_a_restarted_node_finds_the_swarm(tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"

    async def main() -> None:
        async with open_libp2p(BEN, LOOPBACK) as host, trio.open_nursery() as nursery:
            async with open_libp2p(ANN, LOOPBACK) as gone, trio.open_nursery() as first_life:
                bootstrap = gone.addresses()
                first_life.start_soon(member(ANN, gone, (), AddressBook()).run)
                friend = member(BEN, host, bootstrap, AddressBook())
                nursery.start_soon(friend.run)
                async with open_libp2p(CAT, LOOPBACK) as before:
                    node = member(CAT, before, bootstrap, AddressBook.load(path))
                    first_life.start_soon(node.run)
                    await until_known(node, ANN, BEN)
                    await until_known(friend, ANN, CAT)
                    while BEN.peer_id not in node._book.entries:  # noqa: ASYNC110 - greeted, it is
                        await trio.sleep(0.05)  # a peer; the book learns of it by our own hello
                    first_life.cancel_scope.cancel()
            await node._book.save_if_changed(
                trio.to_thread.run_sync
            )  # now that nothing else writes it
            async with open_libp2p(CAT, LOOPBACK) as again:
                node = member(CAT, again, bootstrap, AddressBook.load(path))
                nursery.start_soon(node.run)
                await until_known(node, BEN)
                assert ANN.peer_id not in node.peers
                nursery.cancel_scope.cancel()

    run(main)
