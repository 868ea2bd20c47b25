"""Texts that a regular expression of the item matches as a whole. The only file that imports `re2`,
whose time is in proportion to the text for any pattern."""

import functools
from typing import Any, Final

from node.envs.data.items import Item
from node.envs.data.scorers import ItemScorer, Settings, installed

PATTERN_CHARS_MAX: Final = 1024
TEXT_CHARS_MAX: Final = 4096
MEMORY_BYTES_MAX: Final = 1_048_576  # of a compiled pattern; one that needs more is refused
_COMPILED_MAX: Final = 64


class RegexScorer(ItemScorer):
    """Full matches of the pattern in the column `rule`; the answer is an example of one."""

    needs = frozenset({"rule"})

    def __init__(self, settings: Settings) -> None:
        why = ", whose time is bounded whatever the pattern"
        found = installed("regex", "google-re2", "regex", why)
        self.engine = f"google-re2-{found.partition('.')[0]}"

    def prepare(self) -> None:
        import re2

        del re2

    def own_answer(self, item: Item) -> str:
        if len(item["rule"]) > PATTERN_CHARS_MAX:
            raise ValueError(f"a pattern of over {PATTERN_CHARS_MAX} characters")
        if _compiled(item["rule"]) is None:
            raise ValueError("a pattern that RE2 does not take")
        answer: str = item["answer"].strip()
        if not self.score(item, answer):
            raise ValueError("an answer that its pattern does not match")
        return answer

    def score(self, item: Item, text: str) -> float:
        text = text.strip()
        if len(text) > TEXT_CHARS_MAX or len(item["rule"]) > PATTERN_CHARS_MAX:
            return 0.0
        pattern = _compiled(item["rule"])
        return float(pattern is not None and pattern.fullmatch(text) is not None)


@functools.lru_cache(maxsize=_COMPILED_MAX)
def _compiled(pattern: str) -> Any:
    """The pattern; None: it is none, or too large."""
    import re2

    options = re2.Options()
    options.max_mem = MEMORY_BYTES_MAX
    options.never_capture = True
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None
