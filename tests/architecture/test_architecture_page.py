"""`ARCHITECTURE.md` names every room of the product, and every file by its path."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
FILES = set(re.findall(r"`([a-z0-9_/]+\.py)`", PAGE))
ROOMS = set(re.findall(r"^\| `([a-z0-9_/]+)/` \|", PAGE, re.M))
PACKAGES = ("swarm", "node", "coordinator")
DATA = {"node/config/runs", "node/simulation/scenarios"}  # rooms without code


def rooms() -> set[str]:
    """Folders with code."""
    return {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


def test_page_and_tree_agree() -> None:
    assert rooms() == ROOMS - DATA


def test_what_is_named_is_there() -> None:
    assert {name for name in FILES if not (ROOT / name).is_file()} == set()


def test_a_room_says_what_it_is_for() -> None:
    for room in rooms():
        assert (ROOT / room / "__init__.py").read_text().startswith('"""'), room
