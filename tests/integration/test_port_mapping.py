"""UPnP with a router of our own making, on loopback: search, description, and three calls."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio

from swarm.peers import upnp
from swarm.peers.upnp import Mapping, NoRouter, keep_mapped, map_port
from tests.support import run

pytestmark = pytest.mark.integration

HERE = "127.0.0.1"
GROUP, PORT = "239.255.255.250", 1900
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>{SERVICE}</serviceType><controlURL>/control</controlURL>
<eventSubURL>/event</eventSubURL><SCPDURL>/scpd</SCPDURL></service></serviceList></device>
</deviceList></device></deviceList></device></root>"""


class Router(BaseHTTPRequestHandler):
    calls: list[str]
    refuses: bool

    def do_GET(self) -> None:
        self._answer(200, DESCRIPTION)

    def do_POST(self) -> None:
        action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        values = {
            "GetExternalIPAddress": "<NewExternalIPAddress>203.0.113.7</NewExternalIPAddress>",
            "GetStatusInfo": "<NewConnectionStatus>Connected</NewConnectionStatus>"
            "<NewLastConnectionError>ERROR_NONE</NewLastConnectionError><NewUptime>9</NewUptime>",
        }.get(action, "")
        if action.endswith("PortMapping"):
            port = body.partition("<NewExternalPort>")[2].partition("<")[0]
            type(self).calls.append(f"{action} {port}")
            if self.refuses:
                self._answer(500, "<s:Envelope><s:Body><errorCode>718</errorCode></s:Body>")
                return
        self._answer(
            200,
            '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
            f'<u:{action}Response xmlns:u="{SERVICE}">{values}</u:{action}Response>'
            "</s:Body></s:Envelope>",
        )

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def router(*, refuses: bool = False) -> Iterator[list[str]]:
    """The calls that a router gets while it is there."""
    kind = type("Kind", (Router,), {"calls": [], "refuses": refuses})
    server = ThreadingHTTPServer((HERE, 0), kind)
    search = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    search.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    search.bind((GROUP, PORT))
    try:
        member = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton(HERE))
        search.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    except OSError as error:
        search.close()
        server.server_close()
        pytest.skip(f"no multicast on loopback: {error}")
    ended = threading.Event()
    search.settimeout(0.1)

    def answer() -> None:
        while not ended.is_set():
            try:
                asked, source = search.recvfrom(2000)
            except TimeoutError:
                continue
            target = next(
                (line[3:].strip() for line in asked.decode().split("\r\n") if line[:3] == "ST:"), ""
            )
            if "InternetGatewayDevice:1" in target:
                where = f"http://{HERE}:{server.server_port}/root.xml"
                said = ["HTTP/1.1 200 OK", f"ST: {target}", "USN: uuid:1", f"LOCATION: {where}"]
                search.sendto("\r\n".join([*said, "", ""]).encode(), source)

    threads = [threading.Thread(target=each) for each in (answer, server.serve_forever)]
    for thread in threads:
        thread.start()
    try:
        yield kind.calls  # type: ignore[attr-defined]
    finally:
        ended.set()
        server.shutdown()
        for thread in threads:
            thread.join()
        server.server_close()
        search.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upnp, "SEARCH_MS", 500)


def test_a_port_is_forwarded_and_taken_back_at_the_end() -> None:
    async def main() -> None:
        told: list[Mapping | None] = []
        with router() as calls:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_mapped, 4001, told.append, HERE)
                while not told:  # noqa: ASYNC110
                    await trio.sleep(0.05)
                nursery.cancel_scope.cancel()
        assert told == [Mapping("203.0.113.7", 4001)]
        assert not Mapping("192.168.1.1", 4001).is_public
        ours = [each for each in calls if each.endswith(" 4001")]  # a node may find it, too
        assert ours == ["AddPortMapping 4001", "DeletePortMapping 4001"]

    run(main)


def test_a_router_that_refuses_is_told() -> None:
    async def main() -> None:
        with router(refuses=True), pytest.raises(NoRouter, match="refuses"):
            await map_port(4001, HERE)

    run(main)


def test_without_a_router_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with pytest.raises(NoRouter) as caught:
            await map_port(4001, HERE)
        assert str(caught.value) not in ("", "Success")
        monkeypatch.setattr(upnp, "CALL_TIMEOUT_S", 0.05)
        with pytest.raises(NoRouter, match="no answer"):
            await map_port(4001, HERE)

    run(main)


def test_a_call_that_hangs_takes_one_thread_and_none_of_those_for_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upnp, "CALL_TIMEOUT_S", 0.1)
    hung, released = [], threading.Event()

    def hang(port: int, interface: str | None) -> Mapping:
        hung.append(port)
        released.wait(60)
        return Mapping(HERE, port)

    monkeypatch.setattr(upnp, "_map", hang)

    async def main() -> None:
        for port in range(3):
            with pytest.raises(NoRouter, match="no answer"):
                await map_port(port)
        assert hung == [0]
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        released.set()
        monkeypatch.setattr(upnp, "CALL_TIMEOUT_S", 30.0)
        assert await map_port(9) == Mapping(HERE, 9)

    try:
        run(main)
    finally:
        released.set()
