"""Scenarios of simulated swarms: small TOML files that a user can write.

title = "A third of the nodes die and return every minute"
nodes = 32                  # all of these have defaults, and --nodes and --profile win
profile = "volunteer"
duration_s = 180            # faults and rounds end here
settle_s = 120              # then the network has this long to bring everything everywhere

[swarm]                     # what each node does
local_groups = 1
group_bytes = 16384

[learner]                   # where there is one: it and its workers, beside the nodes
workers = 2

[[faults]]                  # see swarm/simulation/network_faults.py
kind = "crash"
every_s = 60
share = 0.3
for_s = [5, 20]
"""

import tomllib
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from node.config.errors import Source, config_error
from swarm.errors import ConfigError
from swarm.simulation.network_faults import Fault, Seconds

SCENARIO_FILE_BYTES_MAX = 65_536
NODES_MAX = 1024
FAULTS_MAX = 32
CHAOS = "chaos"  # the scenario that each seed draws anew
GANG_SHARE = 0.15  # of its seeds, in which an address block is full of liars
GANG = 5  # of them, one more than it takes to have their block banned


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SwarmTable(_Table):
    """`[swarm]`: settings of each node. Only the policies are not real."""

    local_groups: Annotated[int, Field(ge=1, le=64)] = 1  # I
    # J; None: as many as all others make, so that every node wants every group
    external_groups: Annotated[int, Field(ge=0, le=1024)] | None = None
    group_size: Annotated[int, Field(ge=2, le=64)] = 8  # G
    group_bytes: Annotated[int, Field(ge=512, le=262_144)] = 16_384  # of a signed group, about
    generate_s: Annotated[float, Field(gt=0, le=3600)] = 6.0
    train_s: Annotated[float, Field(gt=0, le=3600)] = 2.0
    unevenness: Annotated[float, Field(ge=0, lt=1)] = 0.2  # how much these differ between nodes
    record_life_s: Annotated[int, Field(ge=10, le=86_400)] = 600


class LearnerTable(_Table):
    """`[learner]`: a central learner and its workers, hosts beyond `nodes`, with set times of
    training and generation."""

    workers: Annotated[int, Field(ge=1, le=64)] = 2
    groups_per_step: Annotated[int, Field(ge=1, le=256)] = 4  # R, of the workers
    pool_groups_per_step: Annotated[int, Field(ge=0, le=1024)] = 0  # J, of what nodes share
    group_size: Annotated[int, Field(ge=2, le=64)] = 4  # G
    staleness_max: Annotated[int, Field(ge=0, le=64)] = 3  # S
    generate_s: Annotated[float, Field(gt=0, le=3600)] = 4.0  # of one group
    train_s: Annotated[float, Field(gt=0, le=3600)] = 4.0
    version_bytes: Annotated[int, Field(ge=1, le=16_777_216)] = 10_000


class Scenario(_Table):
    """One scenario file."""

    title: Annotated[str, Field(max_length=120)] = ""
    nodes: Annotated[int, Field(ge=2, le=NODES_MAX)] = 16
    profile: Annotated[str, Field(max_length=40)] = "volunteer"
    duration_s: Annotated[float, Field(ge=10, le=86_400)] = 120.0
    settle_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0  # at most; 0: nothing is awaited
    patience_s: Annotated[float, Field(gt=0, le=3600)] = 20.0  # after which a group counts as late
    warm_up_s: Seconds = 0.0  # bytes and rounds before this are not counted
    late_nodes: Annotated[int, Field(ge=0, le=NODES_MAX)] = 0  # that join only
    late_s: Seconds = 0.0  # at this time
    liars: Annotated[int, Field(ge=0, le=64)] = 0  # hosts beyond `nodes` that lie all the time
    liars_share_block: bool = False  # all of them and one honest host have one address block
    swarm: SwarmTable = SwarmTable()
    learner: LearnerTable | None = None
    faults: Annotated[tuple[Fault, ...], Field(max_length=FAULTS_MAX)] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.late_nodes >= self.nodes:
            raise ValueError("late_nodes must be fewer than nodes: somebody has to be there")
        return self


def whole_number(name: str, value: int | str, least: int, most: int) -> int:
    """The number that was typed after a flag."""
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"--{name} {value}: must be a whole number; try {least}") from None
    if not least <= number <= most:
        raise ConfigError(f"--{name} {number}: must be from {least} to {most}")
    return number


def packaged_scenarios() -> tuple[str, ...]:
    """Names of the scenarios that come with the package."""
    entries = files("node.simulation").joinpath("scenarios").iterdir()
    return tuple(sorted(e.name.removesuffix(".toml") for e in entries if e.name.endswith(".toml")))


def load_scenario(wanted: str) -> Scenario:
    """A scenario by the name of a packaged one or the path of a file."""
    if wanted in packaged_scenarios():
        label = f"{wanted}.toml"
        return parse_scenario(
            files("node.simulation").joinpath("scenarios", label).read_text(encoding="utf-8"), label
        )
    known = ", ".join((*packaged_scenarios(), CHAOS))
    try:
        with Path(wanted).open("rb") as file:
            raw = file.read(SCENARIO_FILE_BYTES_MAX + 1)
        if len(raw) > SCENARIO_FILE_BYTES_MAX:
            raise ConfigError(f"--scenario {wanted}: larger than {SCENARIO_FILE_BYTES_MAX} bytes")
        return parse_scenario(raw.decode(), Path(wanted).name)
    except OSError as error:
        raise ConfigError(
            f"--scenario {wanted}: {error.strerror}; give a TOML file or one of {known}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--scenario {wanted}: not UTF-8 text; give a TOML file") from None


def parse_scenario(text: str, label: str) -> Scenario:
    """The scenario in a file's text; `label` names the file in errors."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{label}: not TOML ({error}); correct the file") from None
    try:
        return Scenario.model_validate(table)
    except ValidationError as error:
        raise config_error(error, Scenario, lambda _: Source.in_file(label)) from None


def chaos_scenario(seed: int) -> Scenario:
    """A small scenario of that seed's own; its faults are drawn later, by `draw_faults`."""
    rng = Random(f"{seed}/chaos")
    gang = Random(f"{seed}/gang").random() < GANG_SHARE
    scenario = Scenario(
        title=f"drawn from seed {seed}",
        nodes=rng.randrange(5, 10),
        profile=rng.choice(("lan", "fibre", "cable", "adsl", "4g", "transatlantic", "volunteer")),
        duration_s=60.0 + 60.0 * rng.random(),
        settle_s=300.0,
        liars=rng.choice((0, 0, 1)),
        late_nodes=rng.choice((0, 0, 1)),
        late_s=40.0 * rng.random(),
        swarm=SwarmTable(
            local_groups=rng.randrange(1, 4),
            group_size=4,
            group_bytes=rng.choice((1024, 4096, 16_384)),
            generate_s=2.0 + 4.0 * rng.random(),
            train_s=0.5 + 3.0 * rng.random(),
        ),
    )
    if not gang:
        return scenario
    return scenario.model_copy(update={"liars": GANG, "liars_share_block": True})
