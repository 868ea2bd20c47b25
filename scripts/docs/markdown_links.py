"""Links and headings of a Markdown text. Pure; code is no prose, and links in it are none."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FENCED: Final = re.compile(r"^( {0,3})(```+|~~~+)[^\n]*\n.*?^ {0,3}\2[`~]*[ \t]*$", re.M | re.S)
_INDENTED: Final = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}[^\n]*\n|[ \t]*\n(?= {4}))+", re.M)
_INLINE: Final = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
_LINK: Final = re.compile(r"!?\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]\(([^()\s]+)\)")
_HEADING: Final = re.compile(r"^(#{1,6}) +(.+?) *#*$", re.M)
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)


@dataclass(frozen=True, slots=True)
class Link:
    """A link or an image, by where it stands in its text."""

    start: int
    end: int
    target: str
    label: str

    @property
    def path(self) -> str:
        """The part before the anchor; empty: the page itself."""
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        """The part behind the #, if any."""
        return self.target.partition("#")[2]


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def without_blocks(markdown: str) -> str:
    """The text with spaces in place of code blocks, each line where it was."""
    return _INDENTED.sub(_blank, _FENCED.sub(_blank, markdown))


def without_code(markdown: str) -> str:
    """The text with spaces in place of all code, inline code included."""
    return _INLINE.sub(_blank, without_blocks(markdown))


def code(markdown: str) -> list[str]:
    """All code: each block, and what is between the backticks of each inline piece."""
    blocks = [match[0] for match in _FENCED.finditer(markdown)]
    blocks += [match[0] for match in _INDENTED.finditer(_FENCED.sub(_blank, markdown))]
    return blocks + [match[2] for match in _INLINE.finditer(without_blocks(markdown))]


def links(markdown: str) -> list[Link]:
    """All links and images that lead to a file or a heading of the project, in order."""
    found = []
    for match in _LINK.finditer(without_code(markdown)):
        target = markdown[match.start(1) : match.end(1)]
        if not _SCHEME.match(target):
            label = markdown[match.start() : match.start(1) - 2].lstrip("!")[1:]
            found.append(Link(match.start(), match.end(), target, label))
    return found


def with_links(markdown: str, new: Callable[[Link, str], str]) -> str:
    """The text with `new(link, as it is written)` in place of each link."""
    for link in reversed(links(markdown)):
        written = markdown[link.start : link.end]
        markdown = markdown[: link.start] + new(link, written) + markdown[link.end :]
    return markdown


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown).strip().lower().replace(" ", "-")


def anchors(markdown: str) -> set[str]:
    """The anchors of all headings. A heading that was there before gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for _, heading in _HEADING.findall(without_blocks(markdown)):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found
