"""Write constraints.txt: the exact version of every package in this environment.

Run it in an environment in which all tests have just passed. Versions lose their local part
(`+cpu`), so that one file serves machines with and without a GPU; packages that come only with the
CUDA builds are left out, because torch itself asks for exact versions of them, and so does vLLM of
its own and of setuptools. `make lock` then writes scripts/hashes.txt (`lock_hashes` in
packages.sh).
"""

import re
from importlib.metadata import distributions
from pathlib import Path

HEADER = """\
# Exact versions that were tested together on Python 3.11; `make lock` writes this file.
# Every install of this project uses it, so that a later install is the same as today's.
"""
LEFT_OUT = re.compile(r"^(swarm-node|pip|nvidia-.*|cuda-.*|triton|setuptools|vllm.*|xgrammar)$")


def canonical(name: str) -> str:
    """The name in the one spelling that package indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    versions = {
        canonical(found.metadata["Name"]): found.version.partition("+")[0]
        for found in distributions()
    }
    lines = [
        f"{name}=={version}\n"
        for name, version in sorted(versions.items())
        if not LEFT_OUT.match(name)
    ]
    path = Path(__file__).parent.parent / "constraints.txt"
    path.write_text(HEADER + "".join(lines))
    print(f"{path.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
