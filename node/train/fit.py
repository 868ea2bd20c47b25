"""The memory that training a model would take, for `swarm-node doctor`: `python -m node.train.fit
TOKENS`. Reads a trainer's specification as JSON and writes the memory plan with `usual_bytes`, or
`error`."""

import json
import sys
from dataclasses import asdict
from typing import Any

from node.interfaces.trainer_spec import TrainerSpec
from node.train import memory
from swarm.errors import ConfigError


def main() -> None:
    """Answer once."""
    found: dict[str, Any]
    try:
        spec = TrainerSpec.from_record(json.load(sys.stdin))
        plan = memory.plan(spec)
        found = asdict(plan) | {"usual_bytes": memory.usual_bytes(spec, plan, int(sys.argv[1]))}
    except ConfigError as error:
        found = {"error": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
