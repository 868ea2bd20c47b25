"""`ARCHITECTURE.md` names every module, and no module that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = ("swarm", "node", "coordinator")


def modules() -> set[str]:
    return {
        path.name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }


def named() -> set[str]:
    return {name.rpartition("/")[2] for name in re.findall(r"`([a-z0-9_/]+\.py)`", PAGE)}


def test_page_and_tree_agree() -> None:
    assert modules() - named() == set(), "not on the page"
    assert named() - modules() == set(), "not in the tree"
