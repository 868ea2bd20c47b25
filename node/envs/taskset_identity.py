"""The identity of a taskset, found by two fresh processes that have to agree.

`python -m node.envs.taskset_identity` reads rules from its input and writes one line of JSON: the
taskset's hash, or why it is refused. It first confines itself as far as the machine allows.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from node.envs.taskset_rules import (
    TasksetRules,
    library_version,
    package_digest,
    places_of,
    wrong,
)
from node.sandbox import confinement
from node.sandbox.bounds import IMPORTS_BYTES, size_bytes
from node.sandbox.namespaces import SCRATCH
from node.system.caches import home_directory
from node.system.child_environment import child_environ
from swarm.errors import ConfigError
from swarm.texts import printable

FIND_WALL_S: Final = 300.0
REASON_CHARS_MAX: Final = 300
REMEMBERED_MAX: Final = 16
MEMORY_BYTES: Final = 2**29  # of a taskset, beyond what is imported
HASH_SEEDS: Final = ("1", "2")


def identify(rules: TasksetRules) -> str:
    """The hash of a taskset's package, configuration and tasks; ConfigError if it is not installed,
    refused, or two processes make different tasks of it."""
    library_version()
    return _identified(rules.model_dump_json(exclude_defaults=True), package_digest(rules.taskset))


@lru_cache(maxsize=REMEMBERED_MAX)
def _identified(rules: str, package: str) -> str:
    del package  # part of the cache's key
    with ThreadPoolExecutor(len(HASH_SEEDS)) as both:
        found = list(both.map(partial(_look, rules), HASH_SEEDS))
    name = json.loads(rules)["taskset"]
    for each in found:
        if "refused" in each:
            raise ConfigError(printable(str(each["refused"]), REASON_CHARS_MAX))
        if "sha256" not in each:
            raise wrong(f"taskset {name}: loading it ended its process ({each['ended']})")
    if found[0] != found[1]:
        raise wrong(
            f"taskset {name}: two processes make unlike tasks of it; it takes something from a "
            "set, the clock or unseeded chance, so that no stranger could make them again"
        )
    return str(found[0]["sha256"])


def _look(rules: str, hash_seed: str) -> dict[str, Any]:
    """The finding of a fresh process, or the last line of its errors."""
    with tempfile.TemporaryDirectory() as room:
        environ = child_environ()
        environ |= {"HOME": room, "TMPDIR": room, "PYTHONHASHSEED": hash_seed}
        environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "node.envs.taskset_identity"],
                input=json.dumps([rules, str(home_directory())]), capture_output=True, text=True,
                env=environ, timeout=FIND_WALL_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"ended": f"after {FIND_WALL_S:g} s; name fewer tasks by the parameter tasks"}
    with suppress(ValueError):
        found = json.loads(done.stdout)
        if isinstance(found, dict):
            return found
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"ended": printable(lines[-1], REASON_CHARS_MAX)}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of tasksets are no findings
    asked, home = json.loads(sys.stdin.read())
    rules = TasksetRules.model_validate_json(asked)
    places = places_of(rules.taskset)
    before = size_bytes()  # while it is in view
    if confinement.confine(confinement.view_of_python([Path(home)], places)).view:
        os.environ |= {"HOME": str(SCRATCH), "TMPDIR": str(SCRATCH)}
        tempfile.tempdir = str(SCRATCH)
    if before is not None:
        most = before + IMPORTS_BYTES + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    from node.envs.taskset_upstream import check

    try:
        told = {"sha256": check(rules)}
    except ConfigError as error:
        told = {"refused": str(error)}
    except MemoryError:
        told = {"refused": f"taskset {rules.taskset}: takes over {MEMORY_BYTES >> 20} MiB"}
    out.write(json.dumps(told) + "\n")
    out.flush()
    os._exit(0)  # whatever a taskset left running


if __name__ == "__main__":
    main()
