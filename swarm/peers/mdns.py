"""Discovery on the local network by multicast DNS; results are hearsay. Each node announces its
peer id, addresses, and a tag made from the run id and the join key. zeroconf runs in its own
threads and remembers every name: it is restarted after `NAMES_MAX` of them."""

import hashlib
import ipaddress
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Final

import trio
import zeroconf
from zeroconf import Error, ServiceInfo

from swarm.errors import RemoteProtocolError
from swarm.identity import PeerId, public_key_of
from swarm.limits.address_blocks import LOCAL
from swarm.limits.bounded_table import BoundedTable
from swarm.peers.address_book import not_nearer
from swarm.peers.invite import JoinKey
from swarm.wire.messages import ADDRESS_CHARS_MAX, ADDRESSES_MAX

SERVICE: Final = "_swarm-node._tcp.local."
TAG_DOMAIN: Final = b"swarm/lan/1\x00"
TAG_CHARS: Final = 32
ASK_TIMEOUT_MS: Final = 1_000  # query for the text of a service
LOOKUPS_AT_A_TIME: Final = 8
WAITING_MAX: Final = 256  # names to query; beyond this the oldest goes
NAMES_MAX: Final = 8_192  # remembered by zeroconf
AGAIN_S: Final = 60.0  # between restarts of zeroconf
CLOSE_TIMEOUT_S: Final = 3.0

Found = Callable[[PeerId, Sequence[str]], None]


class LanUnavailable(Exception):
    """This machine cannot do multicast; the text gives the reason."""


def tag_of(run_id: str, key: JoinKey | None) -> str:
    """Tag by which members of a swarm recognise each other."""
    secret = key.discovery_key() if key else b""
    return hashlib.sha256(TAG_DOMAIN + secret + run_id.encode()).hexdigest()[:TAG_CHARS]


def announced(addresses: Sequence[str]) -> tuple[str, ...]:
    """Our addresses that other machines on the local network can dial."""
    return not_nearer(addresses, LOCAL)[:ADDRESSES_MAX]


async def run_lan(
    peer: PeerId,
    tag: str,
    addresses: Sequence[str],
    found: Found,
    interfaces: Sequence[str] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Announce `addresses` and report peers with the same tag, until cancelled. LanUnavailable:
    no multicast. `interfaces`: IP addresses of this machine; None: all."""
    token = trio.lowlevel.current_trio_token()

    def report(other: PeerId, where: Sequence[str]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(found, other, where)

    is_started = False
    while True:
        service = await trio.to_thread.run_sync(
            _Lan, peer, tag, tuple(addresses), report, interfaces, abandon_on_cancel=True
        )
        try:
            if not is_started:
                is_started = True
                task_status.started()
            await trio.sleep(AGAIN_S)
            while service.names < NAMES_MAX:  # noqa: ASYNC110  it counts in another thread
                await trio.sleep(AGAIN_S)
        finally:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await trio.to_thread.run_sync(service.close, abandon_on_cancel=True)


class _Lan:
    """Announcement and browser; runs in zeroconf's threads."""

    _is_closing = False

    def __init__(
        self,
        peer: PeerId,
        tag: str,
        addresses: tuple[str, ...],
        report: Found,
        interfaces: Sequence[str] | None,
    ) -> None:
        self._peer = peer
        self._tag = tag
        self._tell = report
        self.names = 0  # announced names
        self._lock = threading.Lock()  # guards the waiting names
        self._waiting: BoundedTable[str, None] = BoundedTable(WAITING_MAX)
        self._rng = Random(peer)
        self._lookups = ThreadPoolExecutor(LOOKUPS_AT_A_TIME, "lan")
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
        self._is_closing = True
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._zeroconf.close()

    def _on_change(
        self,
        zeroconf: zeroconf.Zeroconf,
        service_type: str,
        name: str,
        state_change: zeroconf.ServiceStateChange,
    ) -> None:
        if state_change.name == "Removed" or self._is_closing:
            return  # closing: the query would never be sent
        self.names += 1
        try:
            info = ServiceInfo(service_type, name)
        except Error:  # a bad name must not end the browser's thread
            return
        if info.load_from_cache(zeroconf):
            self._read(info)
            return
        with self._lock:
            gone = self._waiting.put(name, None)
        if gone is None and not self._is_closing:
            self._lookups.submit(self._look_up, zeroconf)

    def _look_up(self, zeroconf: zeroconf.Zeroconf) -> None:
        with self._lock:
            chosen = self._waiting.spread(1, self._rng)
            for name in chosen:
                self._waiting.pop(name)
        for name in chosen:
            with suppress(Error):  # we are closing
                info = zeroconf.get_service_info(SERVICE, name, ASK_TIMEOUT_MS)
                if info is not None:
                    self._read(info)

    def _read(self, info: ServiceInfo) -> None:
        self._report_service({_text(key): _text(value) for key, value in info.properties.items()})

    def _report_service(self, text: dict[str, str]) -> None:
        """Report the peer that a service's text names, if the tag is ours."""
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
