"""Real SkyPilot without any cloud, under the coordinator's provider; what came of it as JSON.

    python -m tests.integration.sky_child DIRECTORY      writes DIRECTORY/outcome.json

Runs in the environment of `tests/extra_env.py`, with a home directory of its own: HOME is in
DIRECTORY, and so are SkyPilot's database, its catalogue and the log of its API server.
"""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from coordinator.fleet_file import Cloud, Fleet, Machine
from coordinator.providers.base import ProviderFailed
from coordinator.providers.skypilot import (
    RECORD_FILE,
    Catalogue,
    SkyProvider,
    cluster_of,
    load_sky,
    one_line,
    resources_of,
    task_of,
)
from swarm.errors import ConfigError
from swarm.identity import Identity

ANSWER_S = 60.0
CLOUD = Cloud(
    infra="runpod/US",
    accelerators="RTX4090:1",
    use_spot=True,
    disk_gb=80,
    image="docker:ubuntu:24.04",
    setup=("echo one", "echo two"),
)
MACHINE = Machine("spot", "skypilot", cloud=CLOUD)
PRICED = {
    "spot": CLOUD,
    "on demand": Cloud(infra="runpod/US", accelerators="RTX4090:1"),
    "anywhere": Cloud(infra="runpod", accelerators="RTX4090:1"),
    "instance": Cloud(infra="runpod/US", instance_type="1x_RTX4090_SECURE"),
    "no such offer": Cloud(infra="runpod/US", accelerators="RTX4090:3"),
    "no such instance": Cloud(infra="runpod/US", instance_type="none"),
    "no such cloud": Cloud(infra="cumulus", accelerators="RTX4090:1"),
    "any cloud": Cloud(accelerators="RTX4090:1"),
}
WRONG = {
    "infra": Cloud(infra="runpod/a/b/c/d"),
    "accelerators": Cloud(infra="runpod", accelerators="RTX4090:many"),
    "cpus": Cloud(infra="runpod", cpus="few"),
}


def said(call: Callable[[], Any]) -> Any:
    """What it returns, or the line of its failure."""
    try:
        with one_line("sky"):
            return call()
    except (ProviderFailed, ConfigError) as error:
        return str(error)


async def main(directory: Path) -> dict[str, Any]:
    sky = await trio.to_thread.run_sync(load_sky)  # as the provider does: not in the main thread
    owner = Identity.generate().peer_id
    key, run_file = directory / "key.pem", directory / "run.toml"
    Identity.generate().save(key, None)
    task = task_of(sky, MACHINE, run_file, key, ["/ip4/203.0.113.7/tcp/1/p2p/x"])
    catalogue = Catalogue(lambda: 0.0, lambda: sky)
    results: dict[str, Any] = {
        "task": task.to_yaml_config(),
        "prices": {name: said(lambda c=c: catalogue.price_per_h(c)) for name, c in PRICED.items()},
        "wrong": {name: said(lambda c=c: repr(resources_of(sky, c))) for name, c in WRONG.items()},
    }
    provider = SkyProvider(directory / "clouds", Fleet(run_file, (), (MACHINE,)), owner)
    try:
        await provider.start(MACHINE)
    except ProviderFailed as error:
        results["start"] = str(error)
    results["left"] = sorted(await provider.look(()))

    def dry_run() -> Any:
        return sky.get(sky.launch(task, cluster_name=cluster_of(owner, "spot"), dryrun=True))

    results["dry run"] = await trio.to_thread.run_sync(said, dry_run)
    record = directory / "clouds" / "lost" / RECORD_FILE
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"cluster": cluster_of(owner, "lost")}))
    provider._refreshed_s = float("-inf")
    with trio.fail_after(ANSWER_S):
        while not (await provider.look(()))["lost"].detail:  # noqa: ASYNC110 - a thread's answer
            await trio.sleep(0.2)
    instance = (await provider.look(()))["lost"]
    results["lost"] = [str(instance.condition), instance.detail]
    await provider.release("lost")
    results["released"] = sorted(await provider.look(()))
    results["threads"] = sorted(t.name for t in threading.enumerate() if not t.daemon)
    return results


if __name__ == "__main__":
    target = Path(sys.argv[1])
    outcome = trio.run(main, target)
    (target / "outcome.json").write_text(json.dumps(outcome, default=str))
