"""The plan file: what a learner does and which workers there are, as TOML."""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordinator.activation import Settings
from coordinator.capacity import WORKERS_MAX, Run, Worker, check_workers
from swarm.errors import ConfigError

PLAN_BYTES_MAX = 1_048_576
MBIT = 1e6 / 8  # bytes a second

_Model = TypeVar("_Model", Run, Worker, Settings)
# how a file says what the model keeps in other units
_LINKS = {"up_mbit_per_s": "up_bytes_per_s", "down_mbit_per_s": "down_bytes_per_s"}

EXAMPLE = """\
# What `swarm-coordinator plan --file` reads. Every figure here is invented; put in your own.

[run]                          # the learner
groups_per_step = 128          # R: rollout groups that one update consumes
train_s = 100.0                # T: seconds of one update
staleness_max = 6              # S: how many steps old a group may be when it is consumed
weights_bytes = 16_400_000_000 # a whole version
# What a version differs by from one so many steps before it. Leave it out: whole versions are sent.
delta_bytes = [[1, 680_000_000], [4, 1_500_000_000], [8, 2_030_000_000]]
up_mbit_per_s = 1000           # the learner's uplink
latency_s = 0.05               # one way between two machines
load_s = 5.0                   # encoding, patching and loading one version
group_bytes = 200_000          # one group on its way back
price_per_h = 15.12            # dollars for the learner
egress_price_per_gb = 0.0      # dollars for what it sends
# inflight_groups_max = 300    # groups generating or waiting; left out: what is needed

[settings]
margin = 1.1                   # supply over what is required

[[workers]]
name = "gpu"
count = 12                     # so many of these: gpu-1 to gpu-12
groups_per_s = 0.16            # measured: groups it generates, whatever becomes of them
generation_s = 90.0            # from the first token of a group to its last, of all but the slowest
up_mbit_per_s = 300
down_mbit_per_s = 900
price_per_h = 0.69
failed_share = 0.02            # of its groups that are never admitted
start_s = 240.0                # paid, and not generating yet
lifetime_s = 14400.0           # mean on a spot market; left out: it stays until it is released

[[workers]]
name = "volunteer"
count = 4
groups_per_s = 0.05
generation_s = 150.0
up_mbit_per_s = 20
down_mbit_per_s = 200
relayed = true                 # behind a router, so it passes nothing on

[[workers]]
name = "datacentre"
groups_per_s = 0.9
generation_s = 60.0
up_mbit_per_s = 1000
down_mbit_per_s = 1000
price_per_h = 6.5
egress_price_per_gb = 0.09
"""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan is made of."""

    run: Run
    workers: tuple[Worker, ...]
    settings: Settings


def load_plan(path: Path) -> PlanFile:
    """
    Raises:
        ConfigError: the file cannot be read, or says something that makes no sense; one line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(PLAN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if len(content) > PLAN_BYTES_MAX:
        raise ConfigError(f"{path}: more than {PLAN_BYTES_MAX} bytes")
    try:
        return parse_plan(content.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no text in UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_plan(text: str) -> PlanFile:
    """
    Raises:
        ConfigError: no TOML, or a table or key that is missing, unknown, or has a wrong value.
    """
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"no TOML: {error}") from None
    _known(tables, ("run", "workers", "settings"), "")
    run = _made(Run, _table(tables, "run"), "run")
    settings = _made(Settings, _table(tables, "settings", {}), "settings")
    listed = tables.get("workers", [])
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError("workers: must be a list of tables, each under [[workers]]")
    workers: list[Worker] = []
    for number, table in enumerate(listed, 1):
        workers += _workers(dict(table), f"workers {number}", WORKERS_MAX - len(workers))
    check_workers(workers)
    return PlanFile(run, tuple(workers), settings)


def _workers(table: dict[str, Any], where: str, room: int) -> list[Worker]:
    """One worker, or `count` of them by number."""
    if "count" not in table:
        return [_made(Worker, table, where)]
    count = table.pop("count")
    if type(count) is not int or not 1 <= count <= room:
        raise ConfigError(
            f"{where}: count = {_shown(count)}: must be a whole number above 0, and all workers "
            f"together at most {WORKERS_MAX}"
        )
    one = _made(Worker, table, where)
    return [dataclasses.replace(one, name=f"{one.name}-{n}") for n in range(1, count + 1)]


def _table(tables: Mapping[str, Any], name: str, default: Any = None) -> dict[str, Any]:
    found = tables.get(name, default)
    if not isinstance(found, dict):
        raise ConfigError(f"[{name}]: is missing" if found is None else f"{name}: must be a table")
    return dict(found)


def _made(model: type[_Model], table: dict[str, Any], where: str) -> _Model:
    """A model from its table: names, then types, then what the model itself says of ranges."""
    fields = {each.name: each for each in dataclasses.fields(model)}
    written = {own: said for said, own in _LINKS.items() if own in fields}
    names: list[str] = [written.get(name, name) for name in fields]
    _known(table, (*names, "count") if "name" in fields else tuple(names), f"{where}: ")
    values: dict[str, Any] = {}
    for said, value in table.items():
        name = _LINKS.get(said, said)
        values[name] = _typed(str(fields[name].type), value, f"{where}: {said}")
        if said in _LINKS:
            values[name] *= MBIT
    for name, each in fields.items():
        if name not in values and each.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: {written.get(name, name)} is missing")
    try:
        return model(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {_in_file_units(str(error))}") from None


def _in_file_units(message: str) -> str:
    """A complaint about a link in the units that the file has."""
    for said, own in _LINKS.items():
        if message.startswith(f"{own} = "):
            value, _, rest = message.removeprefix(f"{own} = ").partition(":")
            return f"{said} = {float(value) / MBIT:g}:{rest}"
    return message


def _typed(kind: str, value: Any, where: str) -> Any:
    """The value, if it is of the kind that the field's annotation names."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if "tuple" in kind:
        return _pairs(value, where)
    if "bool" in kind:
        good, wanted = isinstance(value, bool), "true or false"
    elif "str" in kind:
        good, wanted = isinstance(value, str), "a text"
    elif "int" in kind:
        good, wanted = type(value) is int, "a whole number"
    else:
        good, wanted = is_number, "a number"
    if not good:
        raise ConfigError(f"{where} = {_shown(value)}: must be {wanted}")
    return value


def _pairs(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    good = isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and all(type(part) is int for part in each)
        for each in value
    )
    if not good:
        raise ConfigError(f"{where} = {_shown(value)}: must be a list of [steps, bytes]")
    return tuple((each[0], each[1]) for each in value)


def _known(table: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
            raise ConfigError(f"{where}{_shown(key)}: no such setting; {hint}")


def _shown(value: object) -> str:
    text = "".join(char if char.isprintable() else "?" for char in str(value))
    return text if len(text) <= 60 else text[:59] + "…"
