"""Which join key a node has, and who may connect to it."""

from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig
from node.hosting.membership import JOIN_KEY_FILE, Membership, invitation_of
from swarm.errors import ConfigError, SwarmError
from swarm.identity import Identity
from swarm.peers.invite import Invitation, JoinKey
from tests.unit.tasks_support import ALICE, BOB, make_run

RUN = make_run()
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{ALICE}"


def membership(data_dir: Path, **settings: Any) -> Membership:
    return Membership.of(NodeConfig(run=RUN, data_dir=data_dir, **settings))


def invite(key: JoinKey | None) -> str:
    return Invitation(RUN.run_id, (ADDRESS,), key).encode()


def test_a_swarm_is_open_unless_asked(tmp_path: Path) -> None:
    assert membership(tmp_path) == Membership(None, None)
    assert membership(tmp_path, invite=invite(None)).key is None
    assert not list(tmp_path.iterdir())


def test_a_private_node_stays_in_its_swarm(tmp_path: Path) -> None:
    first = membership(tmp_path, private=True)
    assert first.key is not None
    assert first.network_key != first.key.secret
    assert (tmp_path / JOIN_KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert membership(tmp_path) == membership(tmp_path, private=True) == first
    other = tmp_path / "other"
    other.mkdir()
    assert membership(other, invite=invite(first.key)) == first
    assert membership(other) == first


def test_contradictions_are_refused_and_show_no_key(tmp_path: Path) -> None:
    key = JoinKey(b"s" * 32)
    for settings in (
        {"private": True, "invite": invite(None)},
        {"private": True, "peers": (ADDRESS,)},
    ):
        with pytest.raises(ConfigError):
            membership(tmp_path, **settings)
    assert not list(tmp_path.iterdir())
    membership(tmp_path, invite=invite(key))
    for text in (invite(JoinKey(b"t" * 32)), invite(None)):
        with pytest.raises(ConfigError, match="another private swarm") as info:
            membership(tmp_path, invite=text)
        assert text not in str(info.value)
        assert key.secret.hex() not in str(info.value)


def test_a_list_lets_in_those_on_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"{ALICE}\n")
    allowed = membership(tmp_path, allow=path)
    assert allowed.admits(ALICE, None)
    assert not allowed.admits(BOB, "203.0.113.7")
    assert membership(tmp_path).admits(BOB, None)
    path.write_text(f"{Identity(b'c' * 32).peer_id}\n")
    assert not membership(tmp_path, allow=path).admits(ALICE, None)


def test_an_invitation_needs_a_node_that_runs(tmp_path: Path) -> None:
    with pytest.raises(SwarmError):
        invitation_of(tmp_path)
