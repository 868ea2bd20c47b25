"""The attackers' process: runs some attacks side by side for their time and tells what they cost.

Started by `siege.py` with one JSON object on its input; it prints one at its end. It is niced, ends
by itself, and starts no other process.
"""

import json
import os
import resource
import sys
from typing import Any

import trio
from siege_attacks import ATTACKS, Assault, load_class, tried
from siege_wire import Door

NICENESS = 15
GRACE_S = 10.0  # for an attack to end after its time
DESCRIPTORS_MAX = 8_192
MEMORY_BYTES_MAX = 2 * 2**30  # of address space beyond which this process fails, and nothing else


def bound_ourselves() -> None:
    """Let an attack that goes wrong hurt nobody but this process."""
    os.nice(NICENESS)
    most = min(DESCRIPTORS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def cpu_s(used: resource.struct_rusage) -> float:
    """Processor time of all kinds."""
    return used.ru_utime + used.ru_stime


async def one(assault: Assault) -> dict[str, Any]:
    """One attack, for its time."""
    failure = ""
    with trio.move_on_after(assault.seconds):
        try:
            await tried(assault, ATTACKS[assault.name].run, assault)
        except Exception as error:  # noqa: BLE001  boundary: told in the table as a broken attack
            failure = repr(error)[:300]
    spent = assault.spent
    return {
        "name": assault.name,
        "bytes_out": spent.bytes_out,
        "connections": spent.connections,
        "counts": spent.counts,
        "failure": failure,
        "claims": [
            {"what": each.what, "value": each.value, "most": each.most, "holds": each.holds}
            for each in assault.claims
        ],
    }


async def main(order: dict[str, Any]) -> dict[str, Any]:
    """All attacks of an order."""
    results: list[dict[str, Any]] = []

    async def run(assault: Assault) -> None:
        results.append(await one(assault))

    with trio.move_on_after(order["seconds"] + GRACE_S):
        async with trio.open_nursery() as nursery:
            for place, name in enumerate(order["names"]):
                nursery.start_soon(run, assault_of(order, name, place))
    return {"attacks": sorted(results, key=lambda each: str(each["name"]))}


def assault_of(order: dict[str, Any], name: str, place: int) -> Assault:
    """What one attack of an order gets. All of an order come from one block of addresses."""
    return Assault(
        name=name,
        door=Door(*order["door"]),
        run_id=order["run_id"],
        seconds=order["seconds"],
        network=order["network"],
        block=order["block"],
        extra=order["extra"] | {"place": place},
    )


if __name__ == "__main__":
    given = json.load(sys.stdin)
    load_class(given["kind"])
    bound_ourselves()  # what is above counts as nobody's
    began = resource.getrusage(resource.RUSAGE_SELF)
    answer = trio.run(main, given)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps(answer | {"cpu_s": cpu_s(used) - cpu_s(began)}), flush=True)
