"""The dashboard page saved with its data: one file that opens offline and asks no host. Pure."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Final

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SCRIPTS: Final = (
    "format.js",
    "charts.js",
    "map.js",
    "tables.js",
    "saved.js",
    "stream.js",
    "app.js",
)  # fmt: skip  each after those that it imports from
_IMPORT: Final = re.compile(r"^import .*$\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)


def page_files() -> dict[str, bytes]:
    """The page's files by name. Read once: they are part of the package."""
    folder = files("swarm.telemetry.dashboard") / "static"
    found = {each.name: each for each in folder.iterdir() if PurePath(each.name).suffix in TYPES}
    return {name: each.read_bytes() for name, each in found.items()}


def saved_page(state: Mapping[str, Any]) -> str:
    """The page for one state, whose key `saved` has what a report shows beside the dashboard."""
    texts = {name: content.decode() for name, content in page_files().items()}
    # No text in the data can end its element: no `<` is left in it.
    data = json.dumps(state, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = "\n" + _EXPORT.sub("", _IMPORT.sub("", "".join(texts[name] for name in SCRIPTS)))
    style = texts["style.css"]
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    mark = "data:image/svg+xml;base64," + base64.b64encode(texts["mark.svg"].encode()).decode()
    parts = {
        '<meta charset="utf-8">': '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="icon" href="/mark.svg" type="image/svg+xml">': "",
        '<link rel="stylesheet" href="/style.css">': f"<style>{style}</style>",
        '<script type="module" src="/app.js"></script>': "",
        'src="/mark.svg"': f'src="{mark}"',
        "</body>": f'<script type="application/json" id="saved-state">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }
    page = texts["index.html"]
    for part, instead in parts.items():
        before, found, after = page.partition(part)
        assert found, part
        page = f"{before}{instead}{after}"
    return page


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
