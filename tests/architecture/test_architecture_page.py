"""`ARCHITECTURE.md` names every room of `swarm` and every module of the others, by where it is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
FILES = set(re.findall(r"`([a-z0-9_/]+\.py)`", PAGE))
ROOMS = set(re.findall(r"^\| `([a-z0-9_/]+)/` \|", PAGE, re.M))
FLAT = ("node", "coordinator")  # which list their modules one by one
FILES_MAX = 12  # in a room


def modules(package: str) -> set[str]:
    return {path.name for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"}


def rooms(package: str) -> dict[str, int]:
    """Folders with code, and how many files each has."""
    found: dict[str, int] = {}
    for path in (ROOT / package).rglob("*.py"):
        folder = str(path.parent.relative_to(ROOT))
        found[folder] = found.get(folder, 0) + (path.name != "__init__.py")
    return found


def test_page_and_tree_agree() -> None:
    assert {room for room in ROOMS if room.startswith("swarm")} == set(rooms("swarm"))
    for package in FLAT:
        named = {name.rpartition("/")[2] for name in FILES}
        assert modules(package) - named == set(), "not on the page"


def test_what_is_named_is_there() -> None:
    known = {
        str(path.relative_to(ROOT))
        for package in ("swarm", *FLAT)
        for path in (ROOT / package).rglob("*.py")
    }
    missing = {name for name in FILES if not any(f"/{path}".endswith(f"/{name}") for path in known)}
    assert missing == set()


def test_a_room_has_a_dozen_files_at_most_and_says_what_it_is_for() -> None:
    assert {room: count for room, count in rooms("swarm").items() if count > FILES_MAX} == {}
    for room in rooms("swarm"):
        assert (ROOT / room / "__init__.py").read_text().startswith('"""'), room
