"""The identity of other people's tasks, found by two fresh processes that have to agree.

`python -m node.envs.package_identity` reads rules from its input and writes one line of JSON: the
hash, and digests of what it saw, or why the package is refused. It first confines itself as far as
the machine allows. The second process has another hash seed; environments are told (`again`) to
play in another order at another time.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from node.envs.package_rules import PackageRules
from node.sandbox import confinement
from node.sandbox.bounds import IMPORTS_BYTES, size_bytes
from node.sandbox.namespaces import SCRATCH
from node.system.caches import home_directory
from node.system.child_environment import confined_environ
from swarm.errors import ConfigError
from swarm.texts import printable

FIND_WALL_S: Final = 300.0
REASON_CHARS_MAX: Final = 300
REMEMBERED_MAX: Final = 16
MEMORY_BYTES: Final = 2**29  # of a package, beyond what is imported
HASH_SEEDS: Final = ("1", "2")
# By environment: the rules in a text, and the check of rules.
_CHECKS: Final = {
    "verifiers": ("node.envs.taskset_rules:rules_of", "node.envs.taskset_upstream:check"),
    "verifiers_tools": (
        "node.envs.taskset_rules:tool_rules_of",
        "node.envs.taskset_upstream:check",
    ),
    "environment_factory": ("node.envs.factory_rules:rules_of", "node.envs.factory_upstream:check"),
}


class PackageFindings(NamedTuple):
    """A finding of one process."""

    sha256: str
    trail: Sequence[tuple[str, str]] = ()  # names and digests of what has to be alike


def identify(rules: PackageRules) -> str:
    """The hash of a package, its configuration and tasks; ConfigError if it is not installed,
    refused, or two processes make different tasks of it."""
    rules.check_library()
    return _identified(type(rules), rules.model_dump_json(exclude_defaults=True), rules.digest())


@lru_cache(maxsize=REMEMBERED_MAX)
def _identified(kind: type[PackageRules], text: str, package: str) -> str:
    del package  # part of the cache's key
    rules = kind.model_validate_json(text)
    with ThreadPoolExecutor(len(HASH_SEEDS)) as both:
        found = list(both.map(partial(_look, rules), HASH_SEEDS))
    for each in found:
        if "refused" in each:
            raise ConfigError(printable(str(each["refused"]), REASON_CHARS_MAX))
        if "sha256" not in each:
            raise rules.refusal(f"loading it ended its process ({each['ended']})")
    one, other = found
    if one != other:
        pairs = zip(one["trail"], other["trail"], strict=False)
        what = next((mine[0] for mine, its in pairs if mine != its), "tasks")
        raise rules.refusal(
            f"two processes make unlike {printable(str(what), REASON_CHARS_MAX)} of it; it takes "
            "something from a set, the clock, unseeded chance or what it did before, so that no "
            "stranger could make them again"
        )
    return str(one["sha256"])


def _look(rules: PackageRules, hash_seed: str) -> dict[str, Any]:
    """The finding of a fresh process, or the last line of its errors."""
    asked = [
        rules.environment,
        rules.model_dump_json(exclude_defaults=True),
        str(home_directory()),
        hash_seed != HASH_SEEDS[0],
    ]
    with tempfile.TemporaryDirectory() as room:
        environ = confined_environ()
        environ |= {"HOME": room, "TMPDIR": room, "PYTHONHASHSEED": hash_seed}
        environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "node.envs.package_identity"],
                input=json.dumps(asked), capture_output=True, text=True,
                env=environ, timeout=FIND_WALL_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            fewer = (
                ", or name fewer tasks by the parameter tasks" if hasattr(rules, "tasks") else ""
            )
            return {"ended": f"not done after {FIND_WALL_S:g} s; a call may never end{fewer}"}
    with suppress(ValueError):
        found = json.loads(done.stdout)
        if isinstance(found, dict):
            return found
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"ended": printable(lines[-1], REASON_CHARS_MAX)}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of packages are no findings
    environment, text, home, again = json.loads(sys.stdin.read())
    rules_of, check = _CHECKS[environment]
    rules: PackageRules = resolve_name(rules_of)(text)
    places = rules.places()
    before = size_bytes()  # while it is in view
    if confinement.confine(confinement.view_of_python([Path(home)], places)).view:
        os.environ |= {"HOME": str(SCRATCH), "TMPDIR": str(SCRATCH)}
        tempfile.tempdir = str(SCRATCH)
    if before is not None:
        most = before + IMPORTS_BYTES + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    looked: Callable[[PackageRules, bool], PackageFindings] = resolve_name(check)
    try:
        told: dict[str, Any] = looked(rules, again)._asdict()
    except ConfigError as error:
        told = {"refused": str(error)}
    except MemoryError:
        told = {"refused": f"{rules.label}: takes over {MEMORY_BYTES >> 20} MiB"}
    out.write(json.dumps(told) + "\n")
    out.flush()
    os._exit(0)  # whatever a package left running


if __name__ == "__main__":
    main()
