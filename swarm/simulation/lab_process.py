"""The process that owns a lab's namespaces and carries its packets. It reads a plan as one line
of JSON, answers with the hosts' locations, then reads one command per line until the input ends."""

import ipaddress
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from swarm.errors import ConfigError
from swarm.simulation.links import LinkProfile
from swarm.simulation.shaper import PacketLinks, Shaper
from swarm.simulation.socket_lab import (
    LAN,
    MTU,
    WAN,
    Namespace,
    close_all,
    configure,
    inside,
    masquerade,
    new_namespace,
    open_tun,
)

# Range of the former 6to4 relays: looks public, unused on the internet.
PUBLIC_NETWORK = ipaddress.IPv4Network("192.88.99.0/24")
HOME_NETWORK = ipaddress.IPv4Network("192.168.0.0/16")  # a /24 per home
COMMAND_BYTES_MAX = 65_536
TUN_QUEUE_PACKETS = 1000


@dataclass(slots=True)
class BuiltNetwork:
    namespaces: list[Namespace] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)  # by host
    addresses: dict[str, str] = field(default_factory=dict)  # of hosts and routers
    tuns: dict[str, int] = field(default_factory=dict)  # of the public network
    profiles: dict[str, LinkProfile] = field(default_factory=dict)
    mtu: int = MTU  # of access links

    def on_the_network(self, name: str, profile: Mapping[str, float]) -> Namespace:
        namespace = self._new()
        address = PUBLIC_NETWORK[len(self.tuns) + 1]
        with inside(namespace):
            self.tuns[name] = open_tun()
            configure(
                f"address add {address}/32 dev {WAN}",
                f"link set {WAN} mtu {self.mtu} txqueuelen {TUN_QUEUE_PACKETS} up",
                f"route add default dev {WAN}",
            )
        self.addresses[name] = str(address)
        self.profiles[name] = LinkProfile(**profile)
        return namespace

    def at_home(self, router: Namespace, number: int, hosts: Sequence[str]) -> None:
        network = list(HOME_NETWORK.subnets(new_prefix=24))[number]
        with inside(router):
            configure(
                f"link add {LAN} type bridge",
                f"address add {network[1]}/24 dev {LAN}",
                f"link set {LAN} up",
            )
        for index, host in enumerate(hosts):
            namespace, address = self._new(), network[index + 2]
            with inside(router):
                configure(
                    f"link add port{index} type veth peer name eth0 netns {namespace.path}",
                    f"link set port{index} master {LAN} up",
                )
            with inside(namespace):
                configure(
                    f"address add {address}/24 dev eth0",
                    "link set eth0 up",
                    f"route add default via {network[1]}",
                )
            self.paths[host], self.addresses[host] = namespace.path, str(address)

    def _new(self) -> Namespace:
        self.namespaces.append(new_namespace())
        return self.namespaces[-1]


def build(plan: Mapping[str, Any], made: BuiltNetwork) -> None:
    for name, profile in plan["hosts"].items():
        made.paths[name] = made.on_the_network(name, profile).path
    for number, home in enumerate(plan["homes"]):
        router = made.on_the_network(home["name"], home["profile"])
        with inside(router):
            masquerade(symmetric=home["symmetric"])
        made.at_home(router, number, home["hosts"])


class Commands:
    def __init__(self, links: PacketLinks) -> None:
        self._links = links
        self._text = b""

    def read(self, descriptor: int) -> bool:
        """Answer available commands. Returns True at the end of the input."""
        more = os.read(descriptor, COMMAND_BYTES_MAX)
        self._text += more
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            _write_line(self._answer(json.loads(line)))
        return not more or len(self._text) > COMMAND_BYTES_MAX

    def _answer(self, command: Mapping[str, Any]) -> object:
        match command["do"]:
            case "cut":
                self._links.cut(command["sources"], command["targets"])
            case "heal":
                self._links.heal()
            case "counters":
                return {host: asdict(counters) for host, counters in self._links.counters.items()}
        return {}


def _write_line(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    plan = json.loads(sys.stdin.buffer.readline())
    made = BuiltNetwork(mtu=plan["mtu"])
    try:
        try:
            build(plan, made)
        except ConfigError as error:
            _write_line({"error": str(error)})
            return
        _write_line({"paths": made.paths, "addresses": made.addresses})
        links = PacketLinks(made.profiles, Random(plan["seed"]))
        packed = {name: ipaddress.IPv4Address(made.addresses[name]).packed for name in made.tuns}
        shaper = Shaper(links, made.tuns, packed, time.monotonic)
        stdin = sys.stdin.fileno()
        shaper.run([stdin], Commands(links).read)
    except BrokenPipeError:
        pass  # the owner is gone
    finally:
        close_all(made.namespaces)


if __name__ == "__main__":
    main()
