"""House rules that no linter knows. Each check is tried on a planted fault as well."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 80
FUNCTION_LINES = 50  # and over them, as over a class's, somebody says why
CLASS_LINES = 300
LONG = "# Long: "
LOADERS = ("from_pretrained", "from_config")  # of transformers' classes
# In pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"/(ho" r"me|Us" r"ers|ro" r"ot|wo" r"rk|tm" r"p)/[A-Za-z0-9_.-]+")
TEXT_SUFFIXES = {".py", ".toml", ".md", ".sh", ".txt", ".cfg", ".yml", ".yaml", ""}
GENERATED = {"constraints.txt", "hashes.txt", "LICENSE"}
BYTES = "corpus"  # folders of what the fuzzers feed, which is no text


def tracked() -> list[Path]:
    """Text files of the project, as git knows them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [
        path
        for path in paths
        if path.is_file()
        and path.suffix in TEXT_SUFFIXES
        and path.name not in GENERATED
        and BYTES not in path.parts
    ]


def unfinished(text: str) -> list[str]:
    return UNFINISHED.findall(text)


def machine_paths(text: str) -> list[str]:
    return [match.group() for match in MACHINE_PATH.finditer(text)]


def long_functions(source: str) -> list[str]:
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]


def long_without_reason(source: str) -> list[str]:
    """Functions and classes over their lengths, without a reason in the line above."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        length_max = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        above = lines[first - 2] if first > 1 else ""
        is_long = node.end_lineno is not None and node.end_lineno - node.lineno >= length_max
        if is_long and not above.strip().startswith(LONG):
            found.append(f"{node.name}: over {length_max} lines, and nobody says why")
    return found


def may_run_code(source: str) -> list[str]:
    """Calls that load a model or parts of one and do not say that its own code is not run: without
    that, transformers asks whoever is at standard input, and waits for the answer."""
    return [
        f"line {node.lineno}: {node.func.attr} without trust_remote_code=False"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOADERS
        and not any(
            each.arg == "trust_remote_code"
            and isinstance(each.value, ast.Constant)
            and each.value.value is False
            for each in node.keywords
        )
    ]


def findings() -> Iterator[str]:
    for path in tracked():
        text, name = path.read_text(), path.relative_to(ROOT)
        yield from (f"{name}: {word}" for word in unfinished(text))
        yield from (f"{name}: {place}" for place in machine_paths(text))
        if path.suffix == ".py":
            yield from (f"{name}: {function}" for function in long_functions(text))
            if name.parts[0] != "tests":
                yield from (f"{name}: {each}" for each in long_without_reason(text))
                yield from (f"{name}: {each}" for each in may_run_code(text))


def test_tree_is_tidy() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    assert len(tracked()) > 20
    assert list(findings()) == []


def test_faults_are_found() -> None:
    assert unfinished("# TO" + "DO: later")
    assert not unfinished("TODOS = 1  # XXXL")
    assert machine_paths('open("/ho' + 'me/alice/x")')
    assert not machine_paths("https://example.org/working/home")
    body = "    pass\n" * FUNCTION_LINES_MAX
    assert long_functions(f"def f():\n{body}")
    assert not long_functions(f"def f():\n{body[9:]}")
    for head, length in (("def f():", FUNCTION_LINES), ("class A:", CLASS_LINES)):
        long = f"{head}\n" + "    pass\n" * length
        assert long_without_reason(long)
        assert long_without_reason(f"@made\n{long}")
        assert not long_without_reason(f"{LONG}of so many parts\n@made\n{long}")
        assert not long_without_reason(long.replace("    pass\n", "", 1))
    assert may_run_code("AutoConfig.from_pretrained(model)")
    assert may_run_code("Auto.from_config(config, trust_remote_code=asked)")
    assert not may_run_code("Auto.from_config(config, trust_remote_code=False)")


@pytest.mark.parametrize("noise", [os.urandom(8), os.urandom(8).hex() * 20])
def test_no_tests_name_differs_between_processes(
    noise: object, request: pytest.FixtureRequest
) -> None:
    """Names made of these bytes would differ in each process, and pytest-xdist would stop."""
    assert noise
    assert request.node.callspec.id in ("noise0", "noise1")
