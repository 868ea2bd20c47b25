"""Orders to SkyPilot: the kind of a machine, the command there, its price. It is
handed the package; `skypilot.py` imports it."""

import hashlib
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from coordinator.files.fleet import Cloud, Machine
from coordinator.providers.base import ProviderFailed, printable
from coordinator.providers.keys import KEY_FILE
from swarm.errors import ConfigError

THERE: Final = "~/swarm-worker"  # on the machine: key, run file and data directory
KILL_AFTER_S: Final = 60  # that a worker has to leave when its life is over
PRICE_LIFE_S: Final = 3_600.0  # spot prices move
PRICES_MAX: Final = 4_096
NAME_CHARS_MAX: Final = 24  # of a machine's name, in that of its cluster

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def cluster_of(owner: str, name: str) -> str:
    """The name of a machine's cluster: its coordinator's peer id and its own name, so
    that no other coordinator, and nobody's own cluster, has the same."""
    digest = hashlib.sha256(f"{owner}/{name}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:NAME_CHARS_MAX].rstrip("-")
    return f"swarm-{readable}-{digest}" if readable else f"swarm-{digest}"


def resources_of(sky: Any, cloud: Cloud) -> Any:
    """The machine to rent as SkyPilot's own object, which checks its fields."""
    return sky.Resources(
        infra=cloud.infra or None,
        accelerators=cloud.accelerators or None,
        instance_type=cloud.instance_type or None,
        cpus=cloud.cpus or None,
        use_spot=cloud.use_spot,
        disk_size=cloud.disk_gb,
        image_id=cloud.image or None,
    )


def task_of(sky: Any, machine: Machine, run_file: Path, key: Path, peers: Sequence[str]) -> Any:
    """The command to run there: a worker of the run, with the key that was made for it."""
    assert machine.cloud is not None
    cloud = machine.cloud
    words = ["join", "--run", "run.toml", "--data-dir", "data", "--key-file", KEY_FILE]
    for peer in peers:
        words += ["--peer", peer]
    life_s = math.ceil(cloud.life_h * 3600)
    run = (
        f"cd {THERE} && chmod 600 {KEY_FILE} && exec timeout --kill-after={KILL_AFTER_S} {life_s} "
        f"{cloud.command} {shlex.join([*words, *machine.arguments])}"
    )
    task = sky.Task(
        name="swarm-worker",
        setup="\n".join(("set -e", *cloud.setup)) if cloud.setup else None,
        run=run,
        file_mounts={f"{THERE}/{KEY_FILE}": str(key), f"{THERE}/run.toml": str(run_file)},
    )
    task.set_resources(resources_of(sky, cloud))
    return task


class Catalogue:
    """Hourly prices, as SkyPilot's catalogue has them."""

    def __init__(self, clock: Callable[[], float], load: Callable[[], Any]) -> None:
        """`clock`: seconds, of which only differences count."""
        self._clock = clock
        self._load = load
        self._known: dict[Cloud, tuple[float, float]] = {}  # price, and when it was looked up

    def price_per_h(self, cloud: Cloud) -> float:
        """Dollars an hour of the cheapest offer, spot or not as is wanted. Blocks. One that was
        known goes on where the catalogue cannot be asked again.

        Raises:
            ConfigError: there is no such offer, or no catalogue; one line.
        """
        known, now_s = self._known.get(cloud), self._clock()
        if known is not None and now_s - known[1] < PRICE_LIFE_S:
            return known[0]
        try:
            with one_line("its price"):
                price = _cheapest(self._load(), cloud)
        except ProviderFailed as error:
            if known is None:
                raise ConfigError(str(error)) from None
            price = known[0]
        if len(self._known) >= PRICES_MAX:
            self._known.clear()
        self._known[cloud] = (price, now_s)
        return price


def _cheapest(sky: Any, cloud: Cloud) -> float:
    resources = resources_of(sky, cloud)
    if resources.cloud is None:
        raise ProviderFailed("its price: infra names no cloud, and prices differ")
    offers = resources.cloud.get_feasible_launchable_resources(resources, num_nodes=1)
    prices = [float(each.get_cost(3600)) for each in offers.resources_list]
    if not (prices := [each for each in prices if math.isfinite(each)]):
        raise ProviderFailed(f"its price: the catalogue has no such offer in {cloud.infra}")
    return min(prices)


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Whatever SkyPilot raises, and a cloud through it, is one line."""
    try:
        yield
    except ProviderFailed as error:
        text = str(error)
        raise ProviderFailed(text if text.startswith(what) else f"{what}: {text}") from None
    except Exception as error:  # noqa: BLE001 - the boundary: any cloud's errors come through here
        text = said(str(error) or type(error).__name__)
        hint = "; `sky api start` says more" if "API server" in text else ""
        raise ProviderFailed(f"{what}: {text}{hint}") from None


def said(text: str) -> str:
    """The first line of a text for people, as a message may quote it."""
    lines = (line.strip() for line in _ESCAPES.sub("", str(text)).splitlines())
    return printable(next(filter(None, lines), ""))
