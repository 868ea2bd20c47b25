"""A fake of the few functions of SkyPilot that the coordinator uses: clusters in a dictionary,
which tests take away, break and hold up. What real SkyPilot makes of the same is in
`tests/integration/test_skypilot.py`."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any


class ClusterStatus(Enum):
    INIT = "INIT"
    UP = "UP"
    STOPPED = "STOPPED"


class JobStatus(Enum):
    RUNNING = "RUNNING"
    FAILED = "FAILED"

    def is_terminal(self) -> bool:
        return self is JobStatus.FAILED


class ClusterDoesNotExist(ValueError):
    pass


@dataclass
class FakeTask:
    name: str
    setup: str | None
    run: str
    file_mounts: dict[str, str]
    resources: Any = None

    def set_resources(self, resources: Any) -> None:
        self.resources = resources


@dataclass
class FakeSky:
    """`sky`, as far as it is used. A request is a function that `get` calls."""

    clusters: dict[str, SimpleNamespace] = field(default_factory=dict)
    launched: list[tuple[str, FakeTask, dict[str, Any]]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    broken: Callable[[str], None] = lambda call: None  # raises for calls that fail
    hold: threading.Event | None = None  # launches wait for it
    at_work: list[str] = field(default_factory=list)  # clusters with an operation under way
    most_at_once: int = 0
    exceptions: Any = field(
        default_factory=lambda: SimpleNamespace(ClusterDoesNotExist=ClusterDoesNotExist)
    )
    StatusRefreshMode: Any = field(default_factory=lambda: SimpleNamespace(FORCE="FORCE"))
    Task = FakeTask

    def __post_init__(self) -> None:
        self.entered = threading.Event()  # a launch waits

    def Resources(self, **what: Any) -> Any:
        cloud = None if what["infra"] is None else SimpleNamespace(
            get_feasible_launchable_resources=lambda resources, num_nodes: SimpleNamespace(
                resources_list=self.offers(resources)
            )
        )  # fmt: skip
        return SimpleNamespace(cloud=cloud, what=what)

    def offers(self, resources: Any) -> list[Any]:
        self.broken("offers")
        prices = [0.3, 0.2] if resources.what["use_spot"] else [0.7, float("nan")]
        return [SimpleNamespace(get_cost=lambda s, p=price: p * s / 3600) for price in prices]

    def get(self, request: Callable[[], Any]) -> Any:
        return request()

    def launch(self, task: FakeTask, cluster_name: str, **how: Any) -> Callable[[], Any]:
        def request() -> None:
            self._enter(cluster_name)
            try:
                self.launched.append((cluster_name, task, how))
                its = self.clusters[cluster_name] = self._record(cluster_name, ClusterStatus.INIT)
                if self.hold is not None:
                    self.entered.set()
                    self.hold.wait(10)
                self.broken("launch")
                its["status"] = ClusterStatus.UP
            finally:
                self.at_work.remove(cluster_name)

        return request

    def down(self, cluster_name: str) -> Callable[[], Any]:
        def request() -> None:
            self._enter(cluster_name)
            try:
                self.broken("down")
                if self.clusters.pop(cluster_name, None) is None:
                    raise ClusterDoesNotExist(f"Cluster {cluster_name!r} does not exist.")
                self.ended.append(cluster_name)
            finally:
                self.at_work.remove(cluster_name)

        return request

    def status(self, names: list[str], refresh: str) -> Callable[[], Any]:
        def request() -> list[Any]:
            self.broken("status")
            return [self.clusters[name] for name in names if name in self.clusters]

        return request

    def job_status(self, cluster_name: str) -> Callable[[], Any]:
        return lambda: {1: self.clusters[cluster_name]["job"]}

    def _enter(self, cluster: str) -> None:
        self.at_work.append(cluster)
        self.most_at_once = max(self.most_at_once, self.at_work.count(cluster))

    def _record(self, name: str, status: ClusterStatus) -> Any:
        return {
            "name": name,
            "status": status,
            "job": JobStatus.RUNNING,
            "init_kind": None,
            "init_status_reason": None,
        }
