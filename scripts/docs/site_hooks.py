"""Additions to mkdocs: pages that stand elsewhere in the tree, and generated parts.

The texts at the root of the project, and the wire's, are pages of the site where they stand, so
that there is no copy to go stale. Links between pages are written for the tree, as GitHub shows it;
here they become links of the site. A link to a file that is no page becomes its label.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from markdown_links import Link, with_links  # noqa: E402
from reference import GENERATED  # noqa: E402

# By where they are in the tree; mkdocs takes the rest from docs/.
ELSEWHERE: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "EXPERIMENTS.md": "experiments.md",
    "swarm/PROTOCOL.md": "protocol.md",
    "assets/dashboard.png": "assets/dashboard.png",
    "experiments/sharing.png": "experiments/sharing.png",
}
MARK: Final = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


def in_tree(src_uri: str) -> str:
    """The source of a page of the site."""
    return {there: here for here, there in ELSEWHERE.items()}.get(src_uri, f"docs/{src_uri}")


def in_site(path: str) -> str | None:
    """The page of a file of the tree; None: it has none."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def filled(markdown: str) -> str:
    """The text with each generated part in the place of its mark."""
    return MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)


def for_site(markdown: str, src_uri: str) -> str:
    """The text with its links as the site needs them."""

    def new(link: Link, written: str) -> str:
        if not link.path:
            return written
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_tree(src_uri)), link.path))
        there = in_site(path)
        if there is None:  # a broken one stays for mkdocs to find
            return link.label if (ROOT / path).exists() else written
        target = posixpath.relpath(there, posixpath.dirname(src_uri) or ".")
        whole = f"{target}#{link.anchor}" if link.anchor else target
        return written.replace(f"]({link.target})", f"]({whole})")

    return with_links(markdown, new)


def on_files(files: Files, *, config: Any) -> Files:
    """Called by mkdocs with the files of docs/."""
    for path, src_uri in ELSEWHERE.items():
        files.append(File.generated(config, src_uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return for_site(filled(markdown), page.file.src_uri)
