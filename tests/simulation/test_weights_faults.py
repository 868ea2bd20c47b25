"""Whatever goes wrong on a version's way, the weights in the end are those that were published."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm.simulation.weights.faults import FAULTS, FaultRow, run_fault
from swarm.simulation.weights.hosts import files_of, write_version

# what the user sees, what serves meanwhile, and figures that show that it happened
EXPECTED: Mapping[str, tuple[str, str, Mapping[str, range]]] = {
    "publisher killed": (
        "version 1 from nothing",
        "nothing",
        {"unfinished when it died": range(1, 5)},
    ),
    "receiver killed": (
        "version 1 from nothing, ",
        "nothing",
        {"here before": range(2, 99), "fetched again": range(1)},
    ),
    "disk full": ("version 2 failed: ", "version 1", {"failures": range(1, 9)}),
    "corrupt chunk": (
        "version 1 from nothing; held against the sender: malformed",
        "nothing",
        {"offences of the sender": range(1, 9), "offences of others": range(1)},
    ),
    "wrong base": (
        "weights: base 1: 'layer.weight' is not what it was; version 2 from nothing",
        "version 1",
        {"from nothing": range(1, 2)},
    ),
    "forged manifest": (
        "version 1 from nothing; held against the forger: not_a_publisher 1, wrong_hash",
        "nothing",
        {"offences of the forger": range(2, 9), "offences of others": range(1)},
    ),
    "overtaken": ("version 4 from 1,3", "version 1", {"outcomes": range(2, 3)}),
    "clock skew": (
        "a version was announced and refused: created 3",
        "version 1",
        {"banned": range(1), "told of the clock": range(1, 2), "told of it afterwards": range(1)},
    ),
    "replayed head": ("nothing", "version 2", {"offences": range(1)}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, tmp_path: Path) -> None:
    row: FaultRow = run_fault(name, tmp_path)
    seen, meanwhile, figures = EXPECTED[name]
    assert row.is_identical
    assert row.seen.startswith(seen)
    assert row.served_meanwhile.startswith(meanwhile)
    assert set(row.figures) == set(figures)
    for figure, expected in figures.items():
        assert row.figures[figure] in expected, figure


def test_one_bit_would_be_noticed(tmp_path: Path) -> None:
    """What `is_identical` compares differs from version to version and by a single bit."""
    one, two = (write_version(tmp_path / str(version), version) for version in (1, 2))
    assert files_of(one) != files_of(two)
    again = write_version(tmp_path / "again", 1)
    assert files_of(one) == files_of(again)
    path = again / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert files_of(one) != files_of(again)
