"""What goes wrong on a version's way: what the user sees, what serves meanwhile, and whether the
weights in the end are bit for bit those that were published.

    python bench_weights_faults.py

Whole services on simulated links, with real files, each fault planted in a swarm of its own. The
exit status is 1 where weights differ.
"""

import sys
import tempfile
from pathlib import Path

from swarm.simulation.weights.faults import FAULTS, run_fault


def main() -> int:
    """Print the table."""
    worst = 0
    print("Fault table: what the user sees | what serves meanwhile | weights in the end")
    for name in FAULTS:
        with tempfile.TemporaryDirectory() as directory:
            row = run_fault(name, Path(directory))
        seen = row.seen.replace(f"{directory}/", "")
        ends = "bit-identical" if row.is_identical else "DIFFERENT"
        worst |= not row.is_identical
        figures = ", ".join(f"{what}: {value}" for what, value in row.figures.items())
        print(
            f"{row.fault}\n    {seen}\n    {row.served_meanwhile} | {ends} | {figures}", flush=True
        )
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
