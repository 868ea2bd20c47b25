"""The fleet file of `swarm-coordinator serve`: where the learner is, and which machines there are.

What a file says of a machine's speed and links is a guess that counts until the learner has
measured it. Prices are not measured: they are what the file, or a provider's catalogue, says.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coordinator.files.tables import counted, known, list_of, made, read_tables, shown, table_of
from coordinator.model.activation import Settings
from coordinator.model.capacity import (
    WORKERS_MAX,
    require_above_0,
    require_not_negative,
    require_unlike,
)
from coordinator.model.pacing import PacingRules
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import public_key_of

PEERS_MAX: Final = 64
ARGUMENTS_MAX: Final = 64
SETUP_MAX: Final = 64
CLOUD_CHARS_MAX: Final = 4_096  # of one text about a machine in a cloud
PROVIDERS: Final = ("local", "static", "skypilot")
GUESS_BYTES_PER_S: Final = 2.5e6  # of a link of which nothing is known: 20 Mbit/s

EXAMPLE = """\
# What `swarm-coordinator serve --file` reads. Prices are dollars.

run = "my-run.toml"            # the run file that workers join with; it names the learner
peers = ["/ip4/203.0.113.7/tcp/4001/p2p/12D3Koo..."]   # where the learner listens

[learner]                      # all of it may be left out
price_per_h = 2.5
# step_s = 30.0                # steps need not be faster than this; left out: as fast as it trains
# up_mbit_per_s = 100          # a guess that counts until it is measured

[settings]                     # how sure and how patient to be; see `plan --example`
margin = 1.1

[pacing]                       # how stale groups may be planned to be, below the run's bound
# effective_share_min = 0.5    # effective sample size over the number of tokens
# mismatch_k3_max = 0.05       # KL from what generated them to what is trained
# depth = 2                    # plan for this staleness, instead of finding the least that does

[[workers]]                    # on this machine, started when they are needed
provider = "local"
name = "here"
count = 2
price_per_h = 0.05             # say, its electricity
arguments = ["--threads", "1"] # of swarm-node join
groups_per_s = 0.5             # a guess, as all below
generation_s = 20.0

[[workers]]                    # a volunteer, who comes by itself; others cost nothing
provider = "static"
name = "anna"
peer = "12D3Koo..."
price_per_h = 0.02

# [[workers]]                  # rented when they are needed, through SkyPilot: the extra `sky`
# provider = "skypilot"
# name = "spot"
# count = 4
# price_per_h = 0.35           # left out: that of SkyPilot's catalogue, which then needs `infra`
# [workers.cloud]
# infra = "runpod/US"          # cloud, or cloud/region, or cloud/region/zone
# accelerators = "RTX4090:1"   # or instance_type, or cpus = "8+"
# use_spot = true              # cheaper, and may be taken back at any time
# disk_gb = 64
# image = "docker:..."         # left out: SkyPilot's
# setup = ["pip install swarm-node"]   # commands, run once
# command = "swarm-node"
# life_h = 24                  # it ends by itself after so long, whatever became of the coordinator
"""


@dataclass(frozen=True, slots=True)
class Cloud:
    """What to rent, as SkyPilot words it, and what to run there. Empty texts: whatever it takes.

    Raises:
        ConfigError: a value is out of its range.
    """

    infra: str = ""
    """`cloud`, `cloud/region` or `cloud/region/zone`."""
    accelerators: str = ""
    """The accelerators to rent, such as `RTX4090:1`."""
    instance_type: str = ""
    """The cloud's name of the kind of machine."""
    cpus: str = ""
    """How many CPUs the machine has, such as `8+`."""
    use_spot: bool = False
    """Rent on the spot market, which is cheaper and may take the machine back at any time."""
    disk_gb: int = 64
    """The size of the disk in GB."""
    image: str = ""
    """The image that the machine starts from. Empty: SkyPilot's."""
    setup: tuple[str, ...] = ()
    """Shell commands that run once, before the worker starts."""
    command: str = "swarm-node"
    """How `swarm-node` is called there."""
    idle_min: int = 5
    """The minutes after its worker has ended at which the machine is given back."""
    life_h: float = 24.0
    """The hours after its worker's start at which the machine is given back, whatever became
    of the coordinator."""

    def __post_init__(self) -> None:
        if not 1 <= self.disk_gb <= 65_536:
            raise ConfigError(f"disk_gb = {self.disk_gb}: must be from 1 to 65536")
        if not 1 <= self.idle_min <= 1_440:
            raise ConfigError(f"idle_min = {self.idle_min}: must be from 1 to 1440")
        if not 0.0 < self.life_h <= 8_760.0:
            raise ConfigError(f"life_h = {self.life_h:g}: must be above 0, at most 8760")
        if not self.command.strip():
            raise ConfigError("command: must name swarm-node as it is called there")
        if len(self.setup) > SETUP_MAX:
            raise ConfigError(f"setup: must be at most {SETUP_MAX} commands")
        texts = (self.infra, self.accelerators, self.instance_type, self.cpus, self.image)
        if any(len(each) > CLOUD_CHARS_MAX for each in (*texts, self.command, *self.setup)):
            raise ConfigError(f"no text may be longer than {CLOUD_CHARS_MAX} characters")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that could generate, whether it does or not.

    Raises:
        ConfigError: a value is out of its range, or does not go with the provider.
    """

    name: str
    """The machine's name; with a count, name-1 and so on."""
    provider: str = "local"
    """Who runs it: `local`, `static` (a volunteer) or `skypilot`."""
    peer: str = ""
    """The peer id of a volunteer's worker."""
    price_per_h: float = 0.0
    """Dollars an hour. Left out for a rented machine: the price in SkyPilot's catalogue."""
    egress_price_per_gb: float = 0.0
    """Dollars for each GB that the machine sends."""
    groups_per_s: float = 0.1
    """A guess of the groups that it generates in a second."""
    generation_s: float = 30.0
    """A guess of the seconds from the first token of a group to its last."""
    up_bytes_per_s: float = GUESS_BYTES_PER_S
    """A guess of its uplink."""
    down_bytes_per_s: float = GUESS_BYTES_PER_S
    """A guess of its downlink."""
    start_s: float = 0.0
    """The seconds from its start until it generates."""
    lifetime_s: float | None = None
    """The mean seconds until a spot market takes it back. Left out: it stays until it is
    released."""
    arguments: tuple[str, ...] = ()
    """Arguments for `swarm-node join`."""
    cloud: Cloud | None = None
    """What to rent, for the provider `skypilot`: the table `[workers.cloud]`."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        self._check_provider()
        require_above_0(self, "groups_per_s", "generation_s", "up_bytes_per_s", "down_bytes_per_s")
        require_not_negative(self, "price_per_h", "egress_price_per_gb", "start_s")
        require_above_0(self, "lifetime_s")
        if len(self.arguments) > ARGUMENTS_MAX:
            raise ConfigError(f"arguments: must be at most {ARGUMENTS_MAX}")

    def _check_provider(self) -> None:
        """What goes with one provider alone is there with it."""
        if self.provider not in PROVIDERS:
            raise ConfigError(
                f"provider = {shown(self.provider)}: must be one of {', '.join(PROVIDERS)}"
            )
        if (self.provider == "static") != bool(self.peer):
            raise ConfigError(
                f"peer = {shown(self.peer)}: a worker of provider static has one, others have none"
            )
        if self.peer:
            check_peer(self.peer)
        if (self.provider == "skypilot") != (self.cloud is not None):
            raise ConfigError(
                "[workers.cloud]: a worker of provider skypilot has it, others do not"
            )


def _check_name(name: str) -> None:
    good = name.replace("-", "").replace("_", "").replace(".", "").isalnum() and name.isascii()
    if not good or len(name) > 64 or name.startswith("."):
        raise ConfigError(
            f"name = {shown(name)}: must be up to 64 letters, digits, hyphens, underscores and dots"
        )


def check_peer(peer: str, field: str = "peer") -> None:
    """
    Raises:
        ConfigError: the text is no peer id.
    """
    try:
        public_key_of(peer)
    except RemoteProtocolError as error:
        raise ConfigError(
            f"{field} = {shown(peer)}: {error.detail}; swarm-node status prints a node's id"
        ) from None


@dataclass(frozen=True, slots=True)
class LearnerCosts:
    """What the learner costs, and what is guessed of it until it is measured.

    Raises:
        ConfigError: a value is out of its range.
    """

    price_per_h: float = 0.0
    """Dollars an hour for the learner's machine."""
    egress_price_per_gb: float = 0.0
    """Dollars for each GB that the learner sends."""
    step_s: float | None = None
    """Steps need not be faster than this. Left out: as fast as the learner trains."""
    train_s: float | None = None
    """A guess of the seconds of one update."""
    up_bytes_per_s: float = 5.0 * GUESS_BYTES_PER_S
    """A guess of the learner's uplink."""
    latency_s: float = 0.05
    """A guess of the seconds one way between two machines."""
    load_s: float = 0.0
    """A guess of the seconds that encoding, patching and loading a version takes."""

    def __post_init__(self) -> None:
        require_not_negative(self, "price_per_h", "egress_price_per_gb", "latency_s", "load_s")
        require_above_0(self, "step_s", "train_s", "up_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that `serve` is told. `unpriced` are machines whose price is to be looked up."""

    run_file: Path
    peers: tuple[str, ...]
    machines: tuple[Machine, ...]
    learner: LearnerCosts = field(default_factory=LearnerCosts)
    settings: Settings = field(default_factory=Settings)
    pacing: PacingRules = field(default_factory=PacingRules)
    unpriced: frozenset[str] = frozenset()


def priced(fleet: Fleet, price_of: Callable[[Cloud], float]) -> Fleet:
    """The fleet with catalogue prices, dollars an hour, where its file says none.

    Raises:
        ConfigError: a price is not to be had.
    """
    machines = list(fleet.machines)
    for place, machine in enumerate(machines):
        if machine.name in fleet.unpriced and machine.cloud is not None:
            try:
                price_per_h = price_of(machine.cloud)
            except ConfigError as error:
                raise ConfigError(
                    f"{machine.name}: {error}; price_per_h in the fleet file needs no catalogue"
                ) from None
            machines[place] = dataclasses.replace(machine, price_per_h=price_per_h)
    return dataclasses.replace(fleet, machines=tuple(machines), unpriced=frozenset())


def load_fleet(path: Path, peers: Sequence[str] = ()) -> Fleet:
    """Read a fleet file; `peers` are further addresses of the learner.

    Raises:
        ConfigError: it cannot be read, or says something that makes no sense; one line.
    """
    try:
        return _fleet(read_tables(path), path.parent, peers)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _fleet(tables: dict[str, Any], folder: Path, more: Sequence[str]) -> Fleet:
    known(tables, ("run", "peers", "learner", "settings", "pacing", "workers"), "")
    run, peers = tables.get("run"), tables.get("peers", [])
    if not isinstance(run, str) or not run:
        raise ConfigError("run: must name the run file that workers join with")
    if not isinstance(peers, list) or not all(isinstance(each, str) for each in peers):
        raise ConfigError("peers: must be a list of addresses")
    addresses = tuple(dict.fromkeys((*more, *peers)))
    if not 0 < len(addresses) <= PEERS_MAX:
        raise ConfigError(
            f"peers: {len(addresses)} addresses; name where the learner listens, here or with "
            f"--peer, at most {PEERS_MAX}"
        )
    machines: list[Machine] = []
    unpriced: set[str] = set()
    for number, table in enumerate(list_of(tables, "workers"), 1):
        has_price = "price_per_h" in table
        made_here = _machines(table, f"workers {number}", WORKERS_MAX - len(machines))
        machines += made_here
        if not has_price:
            unpriced |= {each.name for each in made_here if each.cloud is not None}
    require_unlike([each.name for each in machines])
    return Fleet(
        run_file=folder / run,
        peers=addresses,
        machines=tuple(machines),
        learner=made(LearnerCosts, table_of(tables, "learner", {}), "learner"),
        settings=made(Settings, table_of(tables, "settings", {}), "settings"),
        pacing=made(PacingRules, table_of(tables, "pacing", {}), "pacing"),
        unpriced=frozenset(unpriced),
    )


def _machines(table: dict[str, Any], where: str, room: int) -> list[Machine]:
    count = counted(table, where, room, WORKERS_MAX)
    cloud = None
    if "cloud" in table:
        cloud = made(Cloud, table_of(table, "cloud"), f"{where}: cloud")
        del table["cloud"]
    one = made(Machine, table, where, ("count",), {"cloud": cloud})
    if count is None:
        return [one]
    return [dataclasses.replace(one, name=f"{one.name}-{n}") for n in range(1, count + 1)]
