"""Workers in clouds and on spot markets through SkyPilot, each a cluster of one machine."""

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import trio

from coordinator.fleet_file import Cloud, Fleet, Machine
from coordinator.providers.base import (
    KEY_FILE,
    QUOTED_CHARS_MAX,
    Condition,
    Instance,
    KeyedWorkers,
    ProviderFailed,
)
from swarm.errors import ConfigError
from swarm.leases.coordination import ReportedWorker
from swarm.storage import write_whole
from swarm.texts import printable

THERE: Final = "~/swarm-worker"  # on the machine: key, run file and data directory
KILL_AFTER_S: Final = 60  # from SIGTERM to SIGKILL at the end of a worker's life
PRICE_LIFE_S: Final = 3_600.0  # until a price is looked up again
PRICES_MAX: Final = 4_096  # in the catalogue's cache
NAME_CHARS_MAX: Final = 24  # of a machine's name in its cluster's
RECORD_FILE: Final = "cluster.json"
OPERATIONS_MAX: Final = 16  # starts and releases at a time; others wait
REFRESH_S: Final = 30.0  # between two queries of the clouds
LOOK_S: Final = 2.0  # wait for a query; a later answer counts at the next look
NOT_THERE: Final = "SkyPilot is not installed: pip install skypilot==0.14.1"
GONE: Final = "it is gone: taken back, or ended by itself"

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def cluster_of(owner: str, name: str) -> str:
    """The name of a machine's cluster, unique by the coordinator's peer id and its own name."""
    digest = hashlib.sha256(f"{owner}/{name}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:NAME_CHARS_MAX].rstrip("-")
    return f"swarm-{readable}-{digest}" if readable else f"swarm-{digest}"


def resources_of(sky: Any, cloud: Cloud) -> Any:
    """The machine to rent as SkyPilot's object, which checks its fields."""
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
    """The worker's command on the machine, with its key."""
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
    """Hourly prices from SkyPilot's catalogue."""

    def __init__(self, clock: Callable[[], float], load: Callable[[], Any]) -> None:
        self._clock = clock
        self._load = load
        self._known: dict[Cloud, tuple[float, float]] = {}  # price and time of the query

    def price_per_h(self, cloud: Cloud) -> float:
        """Dollars an hour of the cheapest offer. An old price stays if the catalogue fails. Blocks.

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
    """Turn any error of SkyPilot or a cloud into one line."""
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
    """The first line of a text, fit for a message."""
    lines = (line.strip() for line in _ESCAPES.sub("", str(text)).splitlines())
    return printable(next(filter(None, lines), ""), QUOTED_CHARS_MAX)


def load_sky() -> Any:
    """Import the package, which takes seconds.

    Raises:
        ProviderFailed: it is not installed.
    """
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")  # else it reports each call
    try:
        import sky
    except ImportError as error:
        missing = "" if error.name == "sky" else f" whole ({error})"
        raise ProviderFailed(NOT_THERE.replace(" installed", f" installed{missing}")) from None
    return sky


class SkyProvider(KeyedWorkers):
    """The provider of machines in clouds."""

    def __init__(
        self,
        directory: Path,
        fleet: Fleet,
        owner: str,
        load: Callable[[], Any] = load_sky,
    ) -> None:
        """`owner`: the coordinator's peer id. SkyPilot is loaded at its first use."""
        super().__init__(directory, fleet)
        self._owner = owner
        self._load = load
        self._seen: dict[str, tuple[Condition, str]] = {}  # by name, of machines with a record
        self._changes: Counter[str] = Counter()  # operations begun and ended, by name
        self._starting: set[str] = set()
        self._locks: dict[str, threading.Lock] = {}
        self._one_refresh = threading.Lock()
        self._refreshed_s = -math.inf
        self._limiter = trio.CapacityLimiter(OPERATIONS_MAX)
        self._look_limiter = trio.CapacityLimiter(2)  # the running query, and one that ends at once

    async def look(self, reported: Iterable[ReportedWorker]) -> Mapping[str, Instance]:
        clusters = await trio.to_thread.run_sync(self._on_record)
        now_s = trio.current_time()
        if clusters and now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = now_s
            with trio.move_on_after(LOOK_S):
                await trio.to_thread.run_sync(
                    self._refresh, clusters, abandon_on_cancel=True, limiter=self._look_limiter
                )
        found = {}
        for name in clusters:
            condition, detail = self._seen.get(name, (Condition.STARTING, ""))
            if name in self._starting:
                condition, detail = Condition.STARTING, ""
            found[name] = Instance(name, condition, self._peer_ids.get(name), detail)
        return found

    def _on_record(self) -> dict[str, str]:
        """Clusters that were started and not released, by machine."""
        self._find_keys()
        names = sorted(each.parent.name for each in self._directory.glob(f"*/{RECORD_FILE}"))
        return {name: self._cluster(name) for name in names}

    def _cluster(self, name: str) -> str:
        """The recorded name, else the name to record."""
        try:
            cluster = json.loads((self._directory / name / RECORD_FILE).read_text())["cluster"]
        except (OSError, ValueError, KeyError, TypeError):
            cluster = None
        return cluster if isinstance(cluster, str) else cluster_of(self._owner, name)

    def _refresh(self, clusters: Mapping[str, str]) -> None:
        """Query the clouds. In a thread, one at a time."""
        if not self._one_refresh.acquire(blocking=False):
            return
        try:
            before = Counter(self._changes)
            there: frozenset[str] = frozenset()
            try:
                with one_line("SkyPilot"):
                    seen, there = self._states(clusters)
            except ProviderFailed as error:  # the old conditions stay
                old = {name: self._seen.get(name, (Condition.STARTING, "")) for name in clusters}
                seen = {name: (condition, str(error)) for name, (condition, _) in old.items()}
            for name, state in seen.items():
                if self._changes[name] != before[name]:
                    continue
                known = self._seen.get(name)
                if known is None or known[0] is not Condition.FAILED or state[1] != GONE:
                    self._seen[name] = state  # else the reason is known already
                if state[0] is Condition.FAILED and name in there:
                    self._tidy(name, clusters[name], before[name])
        finally:
            self._one_refresh.release()

    def _states(
        self, clusters: Mapping[str, str]
    ) -> tuple[dict[str, tuple[Condition, str]], frozenset[str]]:
        """The conditions of machines, and the names of those whose clusters exist."""
        sky = self._load()
        wanted = sorted(clusters.values())
        records = sky.get(sky.status(wanted, refresh=sky.StatusRefreshMode.FORCE))
        by_name = {record["name"]: record for record in records}
        seen = {name: _state(sky, by_name.get(its)) for name, its in clusters.items()}
        return seen, frozenset(name for name, its in clusters.items() if its in by_name)

    def _tidy(self, name: str, cluster: str, changes: int) -> None:
        """End a failed cluster that may still cost money, unless an operation began since."""
        lock = self._locks.setdefault(name, threading.Lock())
        if lock.acquire(blocking=False):
            try:
                if self._changes[name] == changes:
                    with contextlib.suppress(ProviderFailed), one_line(name):
                        _down(self._load(), cluster)
            finally:
                lock.release()

    async def start(self, machine: Machine) -> None:
        await trio.to_thread.run_sync(
            self._start, machine, abandon_on_cancel=True, limiter=self._limiter
        )

    def _start(self, machine: Machine) -> None:
        with self._alone(machine.name), one_line(machine.name):
            self._starting.add(machine.name)
            try:
                self._launch(machine)
                self._seen[machine.name] = (Condition.UP, "")
            finally:
                self._starting.discard(machine.name)

    def _launch(self, machine: Machine) -> None:
        sky, directory = self._load(), self._directory / machine.name
        record, cluster = directory / RECORD_FILE, self._cluster(machine.name)
        records = sky.get(sky.status([cluster], refresh=sky.StatusRefreshMode.FORCE))
        for each in records:
            if each["name"] == cluster:
                if record.exists() and _state(sky, each)[0] is Condition.UP:
                    return
                _down(sky, cluster)  # a remainder, or its key is lost
        key = self._make_key(machine.name)
        assert machine.cloud is not None
        task = task_of(sky, machine, self._run_file, key, self._peers)
        write_whole(record, json.dumps({"cluster": cluster}))  # before it costs anything
        try:
            idle_min = machine.cloud.idle_min
            sky.get(
                sky.launch(task, cluster_name=cluster, down=True, idle_minutes_to_autostop=idle_min)
            )
        except BaseException:
            self._seen[machine.name] = (Condition.FAILED, "it did not start, and did not end")
            _down(sky, cluster)  # SkyPilot leaves half-started machines, which cost
            record.unlink(missing_ok=True)
            raise

    async def release(self, name: str) -> None:
        await trio.to_thread.run_sync(
            self._release, name, abandon_on_cancel=True, limiter=self._limiter
        )

    def _release(self, name: str) -> None:
        record = self._directory / name / RECORD_FILE
        with self._alone(name), one_line(name):
            if record.exists():
                _down(self._load(), self._cluster(name))
                record.unlink()
            self._seen.pop(name, None)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Exclude other operations on the machine, and outdate running queries."""
        with self._locks.setdefault(name, threading.Lock()):
            self._changes[name] += 1
            try:
                yield
            finally:
                self._changes[name] += 1


def _state(sky: Any, record: Any) -> tuple[Condition, str]:
    """A cluster's condition from SkyPilot's record; None: there is none."""
    if record is None:
        return Condition.FAILED, GONE
    status = str(record["status"].value)
    if status == "UP":
        try:
            jobs = sky.get(sky.job_status(record["name"])).values()
        except Exception:  # noqa: BLE001 - a machine that does not answer is still up
            return Condition.UP, ""
        ended = [job for job in jobs if job is not None and job.is_terminal()]
        return (Condition.FAILED, f"its worker has ended: {ended[0].value}") if ended else (
            Condition.UP, ""
        )  # fmt: skip
    if status in ("INIT", "PENDING") and record["init_kind"] != "unhealthy":
        return Condition.STARTING, ""
    return Condition.FAILED, said(record["init_status_reason"] or f"it is {status}")


def _down(sky: Any, cluster: str) -> None:
    with contextlib.suppress(sky.exceptions.ClusterDoesNotExist):
        sky.get(sky.down(cluster))
