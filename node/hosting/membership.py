"""The node's key, the join key of a private swarm, the list of allowed peers, and invitations."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from node.config import NodeConfig
from node.observe.status import fetch_status
from swarm.errors import ConfigError
from swarm.identity import Identity, PeerId
from swarm.peers.invite import INVITE_ADDRESSES_MAX, Invitation, JoinKey, read_allow_list

JOIN_KEY_FILE = "join.key"


def load_identity(config: NodeConfig) -> Identity:
    """The node's key, made at the first start."""
    passphrase = os.environ.get(config.passphrase_env)
    if not config.key_path.exists():
        if config.key_file is not None:
            raise ConfigError(
                f"--key-file {config.key_file}: no such file; make it with "
                f"swarm-node keygen --out {config.key_file}"
            )
        Identity.generate().save(config.key_path, passphrase)
    return Identity.load(config.key_path, passphrase)


@dataclass(frozen=True, slots=True)
class Membership:
    """The rules of admission. `key` None: the swarm is open. `allowed` None: no list of peers."""

    key: JoinKey | None
    allowed: frozenset[str] | None

    @classmethod
    def of(cls, config: NodeConfig) -> "Membership":
        """The membership by settings and data directory, where a new key is kept."""
        return cls(
            _join_key(config), None if config.allow is None else read_allow_list(config.allow)
        )

    @property
    def network_key(self) -> bytes | None:
        """The key that both ends of each connection must have."""
        return self.key.handshake_key() if self.key else None

    def admits(self, peer: PeerId, ip: str | None) -> bool:
        return self.allowed is None or peer in self.allowed


def _join_key(config: NodeConfig) -> JoinKey | None:
    path = config.data_dir / JOIN_KEY_FILE
    kept, invitation = JoinKey.load(path), config.invitation
    if invitation is not None and kept is not None and invitation.key != kept:
        raise ConfigError(
            f"--data-dir {config.data_dir} belongs to another private swarm than the invitation: "
            "use another directory"
        )
    if invitation is not None and invitation.key is None and config.private:
        raise ConfigError("--private: the invitation is to an open swarm; leave one of them out")
    if kept is not None:
        return kept
    key = invitation.key if invitation is not None else None
    if key is None and config.private:
        if config.peers:
            raise ConfigError("--private starts a swarm: join this one with --invite instead")
        key = JoinKey.generate()
    if key is not None:
        key.save(path)
    return key


def known_key(invitation: Invitation | None, data_dir: Path) -> JoinKey | None:
    """The join key before a node joins: the invitation's, else the data directory's; None: open."""
    return invitation.key if invitation else JoinKey.load(data_dir / JOIN_KEY_FILE)


def invitation_of(data_dir: Path) -> Invitation:
    """An invitation to the swarm of the node that runs on a data directory."""
    status = fetch_status(data_dir)
    addresses = sorted(status.addresses, key=_reach)[:INVITE_ADDRESSES_MAX]
    if any(_reach(address) < 2 for address in addresses):
        addresses = [address for address in addresses if _reach(address) < 2]
    key = JoinKey.load(data_dir / JOIN_KEY_FILE)
    return Invitation(status.run_id, tuple(addresses), key, status.link_model)


def _reach(address: str) -> int:
    """The reach of an address: 0 the internet, 1 a local network, 2 this machine."""
    parts = address.split("/")
    try:
        ip = ipaddress.ip_address(parts[2])
    except (IndexError, ValueError):
        return 0  # a name
    return 0 if ip.is_global else 2 if ip.is_loopback else 1
