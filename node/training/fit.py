"""What training a model would take, for `swarm-node doctor`: `python -m node.training.fit`.

A trainer's specification comes as JSON on standard input; out goes one JSON object: the plan of
`memory.plan`, or `error`, one line.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

from node.interfaces.trainer_spec import TrainerSpec
from node.training import memory
from swarm.errors import ConfigError


def main() -> None:
    """Answer once."""
    found: dict[str, Any]
    try:
        found = asdict(memory.plan(TrainerSpec.from_record(json.load(sys.stdin))))
    except ConfigError as error:
        found = {"error": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
