"""What is written for readers agrees with the tree. Each check is tried on a planted fault too."""

import dataclasses
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from node.cli import main
from node.config.load import load_run
from node.config.node import Group, NodeConfig
from node.config.run import Frozen
from node.envs import factory, taskset
from node.envs.taskset import Taskset
from swarm.identity import Identity
from swarm.simulation.links import LinkProfile
from tests.architecture.test_cli_surface import COORDINATOR, SETTINGS, SURFACE
from tests.support import script

ROOT = Path(__file__).parents[2]
README_LINES_MAX = 150
TOP = ("README", "ARCHITECTURE", "BENCHMARKS", "CHANGELOG", "CONTRIBUTING", "EXPERIMENTS")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        *(ROOT / f"{name}.md" for name in TOP),
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "swarm" / "PROTOCOL.md",
    )
}
FLAGS = {
    **{f"swarm-node {name}": flags for name, flags in SURFACE.items()},
    **{f"swarm-coordinator {name}": flags for name, flags in COORDINATOR.items()},
}
RUN = ("NodeConfig", "run")  # the rest of a run file, which has tables of its own
SCRIPT = re.compile(
    r"(?<![\w/])((?:scripts|tests)/[\w/]+\.(?:py|sh))(?:[^`\n]*  # at commit ([0-9a-f]{7})\b)?"
)
SCRIPTS_AT = {"3e9842f", "405f7f4"}  # commits that have the scripts of finished work
LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"([^\"]+)|<link[^>]*href=\"([^\"]+)")

markdown = script("markdown_links")
reference = script("reference")


def too_long(text: str) -> bool:
    return text.count("\n") > README_LINES_MAX


def broken_links(page: str, text: str) -> list[str]:
    """Links to what is not there. Parts of the site that are generated have no headings here."""
    found = []
    for link in markdown.links(text):
        target = (ROOT / page).parent / link.path if link.path else ROOT / page
        if not target.exists():
            found.append(f"{page}: {link.target}: no such file")
        elif link.anchor and link.anchor not in markdown.anchors(
            target.read_text() if link.path else text
        ):
            found.append(f"{page}: {link.target}: no such heading")
    return found


def code_of(text: str) -> str:
    """Code alone, inline code on lines of its own."""
    return "\n".join(markdown.code(text))


def missing_targets(text: str, makefile: str) -> set[str]:
    """What `make` is told to make in code, and the Makefile does not know."""
    told = re.findall(r"(?:^|[\s=])make ([a-z][a-z-]*)", code_of(text))
    return set(told) - set(re.findall(r"^([a-z-]+):", makefile, re.M))


def missing_scripts(text: str) -> set[str]:
    """Scripts that are neither in the tree nor, as `script  # at commit 3e9842f` says, in a commit.

    What is in the tree has no commit behind it.
    """
    return {
        name + (f" at {commit}" if commit else "")
        for name, commit in SCRIPT.findall(text)
        if (ROOT / name).is_file() == bool(commit) or (commit and not is_at(commit, name))
    }


def is_at(commit: str, name: str) -> bool:
    """Whether a commit has a file. Where git has no history, all that is known is the commit."""
    if commit not in SCRIPTS_AT:
        return False
    git = ["git", "-C", str(ROOT), "cat-file", "-e"]
    known, there = (
        subprocess.run([*git, what], capture_output=True, check=False).returncode == 0
        for what in (f"{commit}^{{commit}}", f"{commit}:{name}")
    )
    return there or not known


def wrong_commands(text: str) -> list[str]:
    """Lines of code that call a command or a flag that there is not."""
    found = []
    for line in re.findall(r"swarm-(?:node|coordinator) .*", code_of(text)):
        words = shlex.split(line.replace("'", ""), comments=True)
        if words[1:3] == ["service", "install"] and len(words) > 3:  # another command follows it
            del words[1:3]
        name = next((n for n in FLAGS if words[: len(n.split())] == n.split()), None)
        if name is None:
            is_command = len(words) > 1 and words[1].islower() and words[1].isalpha()
            if is_command and words[:2] != ["swarm-node", "weights"]:
                found.append(line)
            continue
        known = {*FLAGS[name].split(), "--help"}
        rest = words[: words.index("swarm-node", 1)] if "swarm-node" in words[1:] else words
        flags = [word.rstrip(",;`").partition("=")[0] for word in rest if word.startswith("--")]
        found += [f"{name}: {flag}" for flag in flags if flag.strip("-") and flag not in known]
    return found


def missing_commands(page: str, flags: dict[str, str]) -> list[str]:
    """Commands, and arguments of theirs that are no settings, that the reference leaves out."""
    parts = dict(re.findall(r"^### (.+)\n((?:(?!^##)[^\n]*\n)*)", page, re.M))
    settings = {f"--{no}{flag[2:]}" for flag in SETTINGS.split() for no in ("", "no-")}
    return [
        f"{name} {flag}"
        for name, told in flags.items()
        for flag in told.split() or [""]
        if name not in parts
        or (
            (flag.startswith("--") and not re.search(rf"(`|, ){flag}\b", parts[name]))
            and not ("[setting" in parts[name] and flag in settings)
        )
    ]


def without_meaning(model: type) -> list[str]:
    return [each.name for each in reference.all_settings_of(model) if not each.meaning]


def missing_settings(page: str, models: Iterator[type]) -> list[str]:
    return [
        f"{model.__name__}.{each.name}"
        for model in models
        for each in reference.all_settings_of(model)
        if not re.search(rf"^\| `{each.name}`( \(`--[a-z-]+`\))? \| ", page, re.M)
        and (model.__name__, each.name) != RUN
    ]


def models() -> Iterator[type]:
    yield NodeConfig
    for tables in (reference.RUN_TABLES, reference.FLEET_TABLES, reference.PLAN_TABLES):
        yield from tables.values()


def test_readme_is_short() -> None:
    assert not too_long(PAGES["README.md"])
    assert too_long("\n" * (README_LINES_MAX + 1))


def test_links_lead_somewhere() -> None:
    assert [fault for page, text in PAGES.items() for fault in broken_links(page, text)] == []
    planted = "[a](no.md) [b](../README.md#none) `[c](no.md)` [d](#none) [e](../README.md#limits)"
    assert len(broken_links("docs/weights.md", planted)) == 3


def test_make_targets_scripts_and_commands_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page, text in PAGES.items():
        assert missing_targets(text, makefile) == set(), page
        if page != "CHANGELOG.md":  # says what once was
            assert missing_scripts(text) == set(), page
            assert wrong_commands(text) == [], page


def test_faults_in_code_are_found() -> None:
    makefile = "demo: x\n\techo\n"
    assert missing_targets("run `make dmo`, which does not make sense", makefile) == {"dmo"}
    assert missing_targets("```sh\nA=1 make demo\n```\n", makefile) == set()
    assert missing_scripts("`scripts/gone.py` and scripts/demo.py") == {"scripts/gone.py"}
    old = "scripts/experiments/attacks.py"
    assert missing_scripts(f"{old} --quick  # at commit 3e9842f") == set()
    for wrong in (f"{old}", f"`{old}`  # at commit 3e9842f", f"{old}\n  # at commit 3e9842f"):
        assert missing_scripts(wrong) == {old}
    assert missing_scripts(f"{old}  # at commit 0000000") == {f"{old} at 0000000"}
    assert missing_scripts("scripts/demo.py  # at commit 3e9842f") == {"scripts/demo.py at 3e9842f"}
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what a commit has is unknown")
    assert missing_scripts("scripts/no.py  # at commit 3e9842f") == {"scripts/no.py at 3e9842f"}


def test_wrong_commands_are_found() -> None:
    planted = "`swarm-node join --per ADDR` `swarm-node jion` `swarm-coordinator plan --json`"
    assert wrong_commands(planted) == ["swarm-node join: --per", "swarm-node jion"]


def test_run_files_on_the_pages_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path))
    # What a taskset makes is found out by its library, which has an environment of its own here.
    monkeypatch.setattr(Taskset, "version", "verifiers-0-r1")
    for module in (factory, taskset):
        monkeypatch.setattr(module, "identify", lambda rules: hashlib.sha256().hexdigest())
    lines = map(json.dumps, script("word_problems").word_problems(9))
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    peer, seen = Identity.generate().peer_id, 0
    for page, text in PAGES.items():
        for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
            if "[[environments]]" in block:
                file = tmp_path / "run.toml"
                file.write_text(block.replace("12D3Koo…", peer))
                assert load_run(file, {})[0].name, page
                seen += 1
    assert seen >= 4


def test_examples_of_data_are_accepted_and_a_run_on_them_tells_a_model_how_to_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path))
    page = PAGES["docs/data.md"]
    rows = [row for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL) for row in [block]]
    (tmp_path / "items.jsonl").write_text("".join(rows))
    assert main(["data", "check", str(tmp_path / "items.jsonl"), "--scorer", "numeric"]) == 0
    assert "1" in capsys.readouterr().out
    for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL):
        file = tmp_path / "mine.toml"
        file.write_text(block)
        assert main(["config", "--run", str(file), "--model", "smollm2"]) == 0
        told = capsys.readouterr().out
        assert "run.answer.system = Give" in told
        assert "run.answer.format = whole" not in told


def test_fields_of_links_are_on_the_page() -> None:
    told = re.findall(r"^\| `(\w+)` \|", PAGES["docs/simulation.md"], re.M)
    assert told == [each.name for each in dataclasses.fields(LinkProfile)]


def test_the_reference_has_every_command_and_argument() -> None:
    page = PAGES["docs/commands.md"]
    assert missing_commands(page, FLAGS) == []
    planted = {"swarm-node join": "--gone", "swarm-node status": "--peer", "swarm-node gone": ""}
    assert missing_commands(page, planted) == [
        "swarm-node join --gone",
        "swarm-node status --peer",
        "swarm-node gone ",
    ]
    assert "| |" not in page.replace("  ", " ")


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_that_is_generated_is_as_it_would_be_written(name: str) -> None:
    """`python scripts/docs/reference.py` writes it."""
    assert PAGES[f"docs/{name}.md"] == reference.page(name)


def test_the_manual_has_every_command_and_argument() -> None:
    manual = script("man")
    text = "".join(manual.page(program) for program in reference.PARSERS).replace("\\-", "-")

    def missing(flags: dict[str, str]) -> list[str]:
        given = {flag for told in flags.values() for flag in told.split() if flag[0] == "-"}
        return [word for word in sorted({*flags, *given}) if word not in text]

    assert missing(FLAGS) == []
    assert missing({"swarm-node gone": "--gone"}) == ["--gone", "swarm-node gone"]


def test_every_setting_has_a_line_that_says_what_it_means() -> None:
    assert missing_settings(PAGES["docs/settings.md"], (m for m in models())) == []
    assert {model.__name__: found for model in models() if (found := without_meaning(model))} == {}
    own = {each for each in Frozen.__subclasses__() if each.__module__.startswith("node.config")}
    assert own <= {*models(), Group}


class Undocumented(BaseModel):
    """Planted."""

    told: int = 1
    """What it is."""
    silent: Annotated[int, Field(ge=1, le=7)] = 2


def test_a_setting_without_a_line_or_a_meaning_is_found() -> None:
    assert without_meaning(Undocumented) == ["silent"]
    assert missing_settings("| `told` | ", iter([Undocumented])) == ["Undocumented.silent"]
    assert reference.all_settings_of(Undocumented)[1].kind == "whole number from 1 to 7"


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(config), "--site-dir", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text()
        assert "<!-- generated" not in text, page
        loaded = [one or other for one, other in LOADED.findall(text)]
        assert loaded
        assert [url for url in loaded if "//" in url] == [], page


@pytest.mark.parametrize("fault", ["[gone](gone.md)", "[gone](weights.md#gone)"])
def test_a_link_that_leads_nowhere_fails_the_site(tmp_path: Path, fault: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for page in (ROOT / "docs").iterdir():
        (docs / page.name).write_bytes(page.read_bytes())
    (docs / "weights.md").write_text(f"{PAGES['docs/weights.md']}\n{fault}\n")
    config = tmp_path / "mkdocs.yml"
    hook = ROOT / "scripts" / "docs" / "site_hooks.py"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {docs}\nhooks: [{hook}]\n")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "gone" in done.stdout + done.stderr


def test_a_change_is_checked_with_its_pages() -> None:
    assert "make docs" in (ROOT / ".ci" / "run").read_text()
