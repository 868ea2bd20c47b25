"""Makes one version after the other until it is killed: `python -m tests.unit.version_child DIR N`.

`N` is the first. Each version that serves is printed.
"""

import sys
from pathlib import Path

from swarm.weights import manifest
from swarm.weights.version_store import Versions
from tests.weights_samples import manifest_of, write_files


def main(directory: str, version: int) -> None:
    versions = Versions(Path(directory), keep=2)
    while True:
        write_files(versions.staging(version), version)
        versions.commit(manifest.encode_manifest(manifest_of(version)))
        versions.make_current(version)
        sys.stdout.write(f"{version}\n")
        sys.stdout.flush()
        versions.prune()
        version += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
