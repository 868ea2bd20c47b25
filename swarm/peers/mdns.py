"""Finding peers on the local network by multicast DNS.

Each node announces a service whose text holds its peer id, its addresses, and a tag. The tag is
made from the run id and, in a private swarm, from the join key: members recognise it, and it tells
others neither. Whatever is found is hearsay: a dial shows whether it is true.

Names are looked at one after the other, none of them for longer than `ASK_TIMEOUT_MS`: whoever
announces a thousand delays the others by that, and shuts out none.

zeroconf works in threads of its own; what it finds is handed to the loop one by one.
"""

import hashlib
import ipaddress
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio
import zeroconf
from zeroconf import Error

from swarm.errors import RemoteProtocolError
from swarm.identity import PeerId, public_key_of
from swarm.limits.address_blocks import LOCAL
from swarm.peers.address_book import not_nearer
from swarm.peers.invite import JoinKey
from swarm.wire.messages import ADDRESS_CHARS_MAX, ADDRESSES_MAX

SERVICE: Final = "_swarm-node._tcp.local."
TAG_DOMAIN: Final = b"swarm/lan/1\x00"
TAG_CHARS: Final = 32
ASK_TIMEOUT_MS: Final = 1_000  # for the text of a service whose name was heard
CLOSE_TIMEOUT_S: Final = 3.0

Found = Callable[[PeerId, Sequence[str]], None]


class LanUnavailable(Exception):
    """This machine cannot do multicast; the text says why."""


def tag_of(run_id: str, key: JoinKey | None) -> str:
    """What members of a swarm recognise each other by."""
    secret = key.discovery_key() if key else b""
    return hashlib.sha256(TAG_DOMAIN + secret + run_id.encode()).hexdigest()[:TAG_CHARS]


def announced(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those of our addresses that another machine on the local network may dial."""
    return not_nearer(addresses, LOCAL)[:ADDRESSES_MAX]


async def run_lan(
    peer: PeerId,
    tag: str,
    addresses: Sequence[str],
    found: Found,
    interfaces: Sequence[str] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Announce `addresses`, and tell of each peer with the same tag, until cancelled.

    `interfaces` are IP addresses of this machine; None: all of them.

    Raises:
        LanUnavailable: there is no multicast here.
    """
    token = trio.lowlevel.current_trio_token()

    def tell(other: PeerId, where: Sequence[str]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(found, other, where)

    service = await trio.to_thread.run_sync(
        _Lan, peer, tag, tuple(addresses), tell, interfaces, abandon_on_cancel=True
    )
    try:
        task_status.started()
        await trio.sleep_forever()
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await trio.to_thread.run_sync(service.close, abandon_on_cancel=True)


class _Lan:
    """The announcement and the browser; lives in zeroconf's threads."""

    _is_closing = False

    def __init__(
        self,
        peer: PeerId,
        tag: str,
        addresses: tuple[str, ...],
        tell: Found,
        interfaces: Sequence[str] | None,
    ) -> None:
        self._peer = peer
        self._tag = tag
        self._tell = tell
        try:
            self._zeroconf = zeroconf.Zeroconf(
                interfaces=list(interfaces) if interfaces else zeroconf.InterfaceChoice.All,
                ip_version=zeroconf.IPVersion.V4Only,
            )
        except OSError as error:
            raise LanUnavailable(str(error)) from error
        try:
            if addresses:
                self._zeroconf.register_service(_service_info(peer, tag, addresses))
            self._browser = zeroconf.ServiceBrowser(
                self._zeroconf, SERVICE, handlers=[self._on_change]
            )
        except (zeroconf.Error, OSError, RuntimeError) as error:
            self._zeroconf.close()
            raise LanUnavailable(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Say goodbye and end the threads."""
        self._is_closing = True
        self._zeroconf.close()

    def _on_change(
        self,
        zeroconf: zeroconf.Zeroconf,
        service_type: str,
        name: str,
        state_change: zeroconf.ServiceStateChange,
    ) -> None:
        if state_change.name == "Removed" or self._is_closing:
            return  # a question while it closes would never be asked, and zeroconf warns of that
        try:
            info = zeroconf.get_service_info(service_type, name, ASK_TIMEOUT_MS)
        except Error:  # a bad name, or we are closing: it must not end the browser's thread
            return
        if info is not None:
            text = {_text(key): _text(value) for key, value in info.properties.items()}
            self._judge(text)

    def _judge(self, text: dict[str, str]) -> None:
        """Tell of what a service's text names, if it is one of ours."""
        peer = text.get("id", "")
        try:
            public_key_of(peer)
        except RemoteProtocolError:
            return
        if text.get("tag") != self._tag or peer == self._peer:
            return
        where = [text.get(f"a{number}", "") for number in range(ADDRESSES_MAX)]
        usable = announced([a for a in where if 0 < len(a) <= ADDRESS_CHARS_MAX])
        if usable:
            self._tell(PeerId(peer), tuple(f"{address}/p2p/{peer}" for address in usable))


def _text(value: bytes | None) -> str:
    return (value or b"").decode("ascii", "replace")


def _service_info(peer: PeerId, tag: str, addresses: Sequence[str]) -> zeroconf.ServiceInfo:
    where = [address.partition("/p2p/")[0] for address in addresses]
    ips = [each.split("/")[2] for each in where if each.startswith("/ip4/")]
    port = next((int(each.split("/")[4]) for each in where), 0)
    return zeroconf.ServiceInfo(
        SERVICE,
        f"{peer}.{SERVICE}",
        port=port,
        addresses=[ipaddress.ip_address(ip).packed for ip in ips],
        properties={"id": peer, "tag": tag}
        | {f"a{number}": address for number, address in enumerate(where)},
        server=f"{peer}.local.",
    )
