"""By which names a web server of ours may be called."""

import pytest

from swarm.errors import ConfigError
from swarm.telemetry.web_hosts import FORBIDDEN, MISDIRECTED, WebHosts, checked_name

LOOPBACK = ("localhost", "LocalHost:8080", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8080")
ADDRESSES = ("192.168.1.7:9464", "203.0.113.9", "[2001:db8::1]:9464", "10.0.0.1")
STRANGERS = (
    "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example",
    "127.0.0.1@evil.example", "evil.example/127.0.0.1", "localhost, evil.example", "", " ", "::1",
    "[localhost]", "[::1", "localhost:port", "127.0.0.1:123456", "0x7f.1", "2130706433x",
)  # fmt: skip


def status(hosts: WebHosts, host: str, *origins: str) -> int | None:
    refusal = hosts.objection([host], origins)
    return None if refusal is None else refusal[0]


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "127.3.0.1", "0.0.0.0", "::", "10.0.0.1"])
def test_no_name_of_a_stranger_is_answered(bound: str) -> None:
    hosts = WebHosts(bound, ["node1.lan"])
    for name in STRANGERS:
        assert status(hosts, name) == MISDIRECTED, name
    for name in (*LOOPBACK, "node1.lan", "NODE1.lan:9464", "node1.lan."):
        assert status(hosts, name) is None, name
    assert hosts.objection([], []) is not None
    assert hosts.objection(["localhost", "localhost"], []) is not None


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_answered_by_who_is_not_on_loopback(address: str) -> None:
    for bound in ("0.0.0.0", "::", "10.0.0.1"):
        assert status(WebHosts(bound), address) is None
    assert status(WebHosts("127.0.0.1"), address) == MISDIRECTED
    assert status(WebHosts("127.0.0.9"), "127.0.0.9:1") is None


def test_a_page_of_another_host_asks_in_vain() -> None:
    hosts = WebHosts("127.0.0.1")
    assert status(hosts, "localhost:8080", "http://localhost:8080") is None
    assert status(hosts, "localhost:8080", "https://LOCALHOST:8080") is None
    for origin in (
        "http://evil.example", "null", "", "http://localhost:8081", "http://localhost",
        "http://127.0.0.1:8080", "localhost:8080",
    ):  # fmt: skip
        assert status(hosts, "localhost:8080", origin) == FORBIDDEN, origin
    assert status(hosts, "localhost", "http://localhost", "http://evil.example") == FORBIDDEN


def test_what_is_given_is_a_name() -> None:
    assert checked_name("Node-1.example.org") == "node-1.example.org"
    for text in ("", "a b", "http://a", "a:1", "*", "a/b", "-a", "x" * 254):
        with pytest.raises(ConfigError, match="give a host's name"):
            checked_name(text)
