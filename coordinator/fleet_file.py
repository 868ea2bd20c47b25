"""The fleet file of `swarm-coordinator serve`: the learner's addresses, and the machines.

Speeds and links are guesses until the learner has measured them. Prices come from the file or from
a provider's catalogue.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from coordinator.model.activation import Settings
from coordinator.model.capacity import (
    WORKERS_MAX,
    Downlink,
    Uplink,
    WrongSetting,
    require_above_0,
    require_not_negative,
    require_unlike,
)
from coordinator.model.pacing import PacingRules
from coordinator.tables import Tables, checked, named, numbered, read_tables, shown
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import public_key_of

PEERS_MAX: Final = 64
ARGUMENTS_MAX: Final = 64
SETUP_MAX: Final = 64
PROVIDERS: Final = ("local", "static", "skypilot")
CloudText = Annotated[str, Field(max_length=4_096)]
GUESS_BYTES_PER_S: Final = 2.5e6  # default of a link: 20 Mbit/s

EXAMPLE: Final = files("coordinator").joinpath("fleet.toml").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Cloud:
    """A machine to rent in SkyPilot's terms, and the worker's command. Empty: its default."""

    infra: CloudText = ""
    """`cloud`, `cloud/region` or `cloud/region/zone`."""
    accelerators: CloudText = ""
    """The accelerators to rent, such as `RTX4090:1`."""
    instance_type: CloudText = ""
    """The cloud's name of the kind of machine."""
    cpus: CloudText = ""
    """CPUs of the machine, such as `8+`."""
    use_spot: bool = False
    """Rent on the spot market, which is cheaper and may take the machine back at any time."""
    disk_gb: Annotated[int, Field(ge=1, le=65_536)] = 64
    """The size of the disk in GB."""
    image: CloudText = ""
    """The image that the machine starts from. Empty: SkyPilot's."""
    setup: Annotated[tuple[CloudText, ...], Field(max_length=SETUP_MAX)] = ()
    """Shell commands that run once, before the worker starts."""
    command: CloudText = "swarm-node"
    """The command that runs `swarm-node` there."""
    idle_min: Annotated[int, Field(ge=1, le=1_440)] = 5
    """The minutes after its worker has ended at which the machine is given back."""
    life_h: Annotated[float, Field(gt=0, le=8_760)] = 24.0
    """The hours after its worker's start at which the machine is given back, whatever became
    of the coordinator."""

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise WrongSetting("command: must name swarm-node as it is called there")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that can generate."""

    name: str
    """The machine's name; with a count, name-1 and so on."""
    provider: str = "local"
    """The provider: `local`, `static` (a volunteer) or `skypilot`."""
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
    up_bytes_per_s: Uplink = GUESS_BYTES_PER_S
    """A guess of its uplink."""
    down_bytes_per_s: Downlink = GUESS_BYTES_PER_S
    """A guess of its downlink."""
    start_s: float = 0.0
    """The seconds from its start until it generates."""
    lifetime_s: float | None = None
    """The mean seconds until a spot market takes it back. Left out: it stays until it is
    released."""
    arguments: Annotated[tuple[str, ...], Field(max_length=ARGUMENTS_MAX)] = ()
    """Arguments for `swarm-node join`."""
    cloud: Cloud | None = None
    """The machine to rent, for the provider `skypilot`: the table `[workers.cloud]`."""

    def __post_init__(self) -> None:
        name = self.name
        letters = name.replace("-", "").replace("_", "").replace(".", "")
        good = letters.isalnum() and name.isascii()
        if not good or len(name) > 64 or name.startswith("."):
            raise WrongSetting(
                f"name = {shown(name)}: must be up to 64 letters, digits, hyphens, underscores "
                "and dots"
            )
        self._check_provider()
        require_above_0(self, "groups_per_s", "generation_s", "up_bytes_per_s", "down_bytes_per_s")
        require_not_negative(self, "price_per_h", "egress_price_per_gb", "start_s")
        require_above_0(self, "lifetime_s")

    def _check_provider(self) -> None:
        """Check that each setting of one provider is there with it only."""
        if self.provider not in PROVIDERS:
            raise WrongSetting(
                f"provider = {shown(self.provider)}: must be one of {', '.join(PROVIDERS)}"
            )
        if (self.provider == "static") != bool(self.peer):
            raise WrongSetting(
                f"peer = {shown(self.peer)}: a worker of provider static has one, others have none"
            )
        if self.peer:
            check_peer(self.peer)
        if (self.provider == "skypilot") != (self.cloud is not None):
            raise WrongSetting(
                "[workers.cloud]: a worker of provider skypilot has it, others do not"
            )


def check_peer(peer: str, field: str = "peer") -> None:
    """
    Raises:
        WrongSetting: the text is no peer id.
    """
    try:
        public_key_of(peer)
    except RemoteProtocolError as error:
        raise WrongSetting(
            f"{field} = {shown(peer)}: {error.detail}; swarm-node status prints a node's id"
        ) from None


@dataclass(frozen=True, slots=True)
class LearnerCosts:
    """The learner's costs, and guesses that count until they are measured."""

    price_per_h: float = 0.0
    """Dollars an hour for the learner's machine."""
    egress_price_per_gb: float = 0.0
    """Dollars for each GB that the learner sends."""
    step_s: float | None = None
    """Steps need not be faster than this. Left out: as fast as the learner trains."""
    train_s: float | None = None
    """A guess of the seconds of one update."""
    up_bytes_per_s: Uplink = 5.0 * GUESS_BYTES_PER_S
    """A guess of the learner's uplink."""
    latency_s: float = 0.05
    """A guess of the seconds one way between two machines."""
    load_s: float = 0.0
    """A guess of the seconds that encoding, patching and loading a version takes."""

    def __post_init__(self) -> None:
        require_not_negative(self, "price_per_h", "egress_price_per_gb", "latency_s", "load_s")
        require_above_0(self, "step_s", "train_s", "up_bytes_per_s")


@dataclass(frozen=True, slots=True)
class _Machines(Machine):
    """One machine, or `count` of them."""

    count: int | None = None


class _FleetTables(Tables):
    run: str = ""
    peers: tuple[str, ...] = ()
    learner: LearnerCosts = LearnerCosts()
    settings: Settings = Settings()
    pacing: PacingRules = PacingRules()
    workers: tuple[_Machines, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """The contents of a fleet file. `unpriced`: machines that take the catalogue's price."""

    run_file: Path
    peers: tuple[str, ...]
    machines: tuple[Machine, ...]
    learner: LearnerCosts = field(default_factory=LearnerCosts)
    settings: Settings = field(default_factory=Settings)
    pacing: PacingRules = field(default_factory=PacingRules)
    unpriced: frozenset[str] = frozenset()


def priced(fleet: Fleet, price_of: Callable[[Cloud], float]) -> Fleet:
    """The fleet with the catalogue's prices, dollars an hour, where its file has none.

    Raises:
        ConfigError: the catalogue has no price.
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
    """Read a fleet file. `peers`: further addresses of the learner.

    Raises:
        ConfigError: it cannot be read, or a setting is wrong; one line.
    """
    with named(path):
        tables = read_tables(path)
        file = checked(_FleetTables, tables)
        if not file.run:
            raise ConfigError("run: must name the run file that workers join with")
        addresses = tuple(dict.fromkeys((*peers, *file.peers)))
        if not 0 < len(addresses) <= PEERS_MAX:
            raise ConfigError(
                f"peers: {len(addresses)} addresses; name where the learner listens, here or with "
                f"--peer, at most {PEERS_MAX}"
            )
        machines: list[Machine] = []
        unpriced: set[str] = set()
        for number, entry in enumerate(file.workers, 1):
            made_here = numbered(entry, number, WORKERS_MAX - len(machines))
            machines += made_here
            if entry.cloud is not None and "price_per_h" not in tables["workers"][number - 1]:
                unpriced |= {each.name for each in made_here}
        require_unlike([each.name for each in machines])
    return Fleet(
        run_file=path.parent / file.run,
        peers=addresses,
        machines=tuple(machines),
        learner=file.learner,
        settings=file.settings,
        pacing=file.pacing,
        unpriced=frozenset(unpriced),
    )
