"""One public name for one class: whoever reads or searches for a name finds one thing."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "coordinator")


def sources() -> dict[str, str]:
    """The product's modules, by path."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def public_classes(source: str) -> list[str]:
    """Names of classes at the top of a module, those in its `if` blocks included."""
    found: list[str] = []
    left = list(ast.parse(source).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found.append(node.name)
        elif isinstance(node, ast.If | ast.Try):
            left += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def shared_names(modules: Mapping[str, str]) -> list[str]:
    """Public classes that have their name in common with another one, with their modules."""
    places = defaultdict(list)
    for path, source in modules.items():
        for name in public_classes(source):
            places[name].append(path)
    return sorted(f"{name}: {', '.join(at)}" for name, at in places.items() if len(at) > 1)


def test_no_two_public_classes_share_a_name() -> None:
    modules = sources()
    assert len(modules) > 100
    assert shared_names(modules) == []


def test_a_second_class_of_one_name_is_found() -> None:
    assert shared_names({"a.py": "class Lease: ...", "b.py": "x = 1\nclass Lease: ..."}) == [
        "Lease: a.py, b.py"
    ]
    assert shared_names({"a.py": "class Lease: ...", "b.py": "if x:\n class Lease: ..."})
    assert not shared_names({"a.py": "class _Lease: ...", "b.py": "class _Lease: ..."})
    assert not shared_names({"a.py": "class Lease: ...", "b.py": "class Offer:\n class Lease: ..."})
