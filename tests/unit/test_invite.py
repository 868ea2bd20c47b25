"""Invitations, join keys and allow-lists: what they hold, and that they keep it to themselves."""

import argparse
import io
import os
import shlex
from pathlib import Path

import base58
import pytest

from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.peers.invite import INVITE_PREFIX, Invitation, JoinKey, read_allow_list
from swarm.peers.invite_flags import add_invitation, take_invitation

PEER = Identity(b"a" * 32).peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"
KEY = JoinKey(b"s" * 32)


RUN_ID = "sums-0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("model", ["", "smollm2"])
def test_a_link_is_an_address_with_run_and_model(model: str) -> None:
    relayed = f"{ADDRESS}/p2p-circuit/p2p/{PEER}"
    invitation = Invitation(RUN_ID, (ADDRESS, relayed), model=model)
    for link, address in zip(invitation.links, invitation.addresses, strict=True):
        assert shlex.quote(link) == link
        assert Invitation.of_link(link) == Invitation(RUN_ID, (address,), model=model)


def test_what_is_no_link_is_told_from_a_damaged_one() -> None:
    assert Invitation.of_link(ADDRESS) is None
    for wrong in ("/run/", f"{ADDRESS}/run/{RUN_ID[:-1]}", f"{ADDRESS}/run/{RUN_ID}/model/"):
        with pytest.raises(ConfigError, match="copy it again"):
            Invitation.of_link(wrong)


@pytest.mark.parametrize("key", [None, KEY])
def test_an_invitation_says_what_was_put_in(key: JoinKey | None) -> None:
    invitation = Invitation("sums-1", (ADDRESS,), key, "smollm2")
    text = invitation.encode()
    assert text.isascii()
    assert text.split() == [text]
    assert Invitation.decode(f" {text}\n") == invitation


def test_a_changed_invitation_is_refused_without_quoting_it() -> None:
    text = Invitation("sums-1", (ADDRESS,), KEY).encode()
    other = "2" if text[30] != "2" else "3"
    for wrong in (
        "", "nonsense", INVITE_PREFIX, INVITE_PREFIX + "0", text[:-1], text + "1",
        text[:30] + other + text[31:], INVITE_PREFIX + "z" * 5000,
        INVITE_PREFIX + base58.b58encode(b"").decode(),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as info:
            Invitation.decode(wrong)
        assert text[10:20] not in str(info.value)


def test_an_address_of_nobody_is_refused() -> None:
    text = Invitation("sums-1", ("/ip4/203.0.113.7/tcp/4001/p2p/nobody",)).encode()
    with pytest.raises(ConfigError):
        Invitation.decode(text)


def test_the_key_is_neither_shown_nor_used_as_it_is() -> None:
    for shown in (repr(KEY), str(KEY), repr(Invitation("sums-1", (ADDRESS,), KEY))):
        assert "ssss" not in shown
    derived = {KEY.secret, KEY.handshake_key(), KEY.discovery_key()}
    assert len(derived) == 3
    assert JoinKey.generate().secret != JoinKey.generate().secret


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "join.key"
    assert JoinKey.load(path) is None
    KEY.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert JoinKey.load(path) == KEY
    assert os.listdir(tmp_path) == ["join.key"]
    with pytest.raises(ConfigError):
        JoinKey.generate().save(path)
    assert JoinKey.load(path) == KEY
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        JoinKey.load(path)


@pytest.mark.parametrize("text", ["", "zz", "ab" * 31, "ab" * 33])
def test_a_damaged_key_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        JoinKey.load(path)


def test_an_allow_list_holds_peer_ids_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"# ours\n\n  {PEER}  # the first\n")
    assert read_allow_list(path) == {PEER}
    path.write_text(f"{PEER}\n{PEER}x\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_allow_list(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_allow_list(tmp_path / "none")


# --- how a command takes one ----------------------------------------------------------------------


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_invitation(parser, "join by an invitation")
    return parser.parse_args(words)


@pytest.mark.parametrize("how", ["text", "input", "file"])
def test_an_invitation_comes_as_text_by_standard_input_or_from_a_file(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Invitation("sums-1", (ADDRESS,), KEY).encode()
    file = tmp_path / "invitation"
    file.write_text(f"{text}\n")
    file.chmod(0o600)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\nyes\n"))
    words = {"text": ("--invite", text), "input": ("--invite", "-")}
    options = options_of(*words.get(how, ("--invite-file", str(file))))
    assert take_invitation(options) == options.invite == text
    assert take_invitation(options) == text  # what came by standard input came once
    assert take_invitation(options_of()) is None


def test_a_file_with_a_join_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "invitation"
    for key, mode, refused in ((KEY, 0o640, True), (KEY, 0o600, False), (None, 0o644, False)):
        file.write_text(Invitation("sums-1", (ADDRESS,), key).encode())
        file.chmod(mode)
        options = options_of("--invite-file", str(file))
        if not refused:
            assert take_invitation(options)
            continue
        with pytest.raises(ConfigError, match="can be read by others: run chmod 600"):
            take_invitation(options)


@pytest.mark.parametrize("content", ["", "swarm1-", "x" * 100_000])
def test_what_holds_no_invitation_is_one_line(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "invitation"
    file.write_text(content)
    for name in (str(file), str(tmp_path / "none")):
        with pytest.raises(ConfigError) as told:
            take_invitation(options_of("--invite-file", name))
        assert "\n" not in str(told.value)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(ConfigError, match="no invitation came by standard input"):
        take_invitation(options_of("--invite", "-"))
