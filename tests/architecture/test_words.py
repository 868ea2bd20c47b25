"""The wording of docstrings and comments is counted, and each count has a bound to be lowered."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "coordinator", "scripts")
WORDS_MAX = 30  # of a sentence; readers lose the subject of longer ones
# Places in the tree that break a rule. Lower a bound when the tree improves; never raise one.
BOUNDS = {"question": 0, "see": 0, "long": 51}

QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)
COMMENT = re.compile(r"^(?:[ \t]*#[^\n]*\n)+|[ \t]{2}#[^\n\"']*$", re.MULTILINE)
QUESTION = re.compile(r"(?:What|Who|Which|Where|How|Whether)\b")
SEE = re.compile(r"See\s+\S+(?:\s+of\s+\S+)?")
SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s")


def docstrings(source: str) -> Iterator[str]:
    """Strings in triple quotes that begin a line, which includes the meaning of a setting."""
    for found in QUOTED.finditer(source):
        start = source.rfind("\n", 0, found.start()) + 1
        if not source[start : found.start()].strip():
            yield found[1].strip()


def comments(source: str) -> Iterator[str]:
    """Comments without their marks; consecutive lines are one."""
    for found in COMMENT.finditer(QUOTED.sub("", source)):
        yield re.sub(r"^[ \t]*#:?", "", found[0], flags=re.MULTILINE)


def long_sentences(text: str) -> Iterator[str]:
    return (part for part in SENTENCE_END.split(text) if len(part.split()) > WORDS_MAX)


def faults(source: str) -> Iterator[tuple[str, str]]:
    """The rule that is broken, and the text that breaks it."""
    for text in docstrings(source):
        if QUESTION.match(text):
            yield "question", text
        if SEE.fullmatch(text.rstrip(".")):
            yield "see", text
    for text in (*docstrings(source), *comments(source)):
        for sentence in long_sentences(text):
            yield "long", sentence


def counts(sources: Iterable[str]) -> Counter[str]:
    return Counter(rule for source in sources for rule, _ in faults(source))


def test_the_tree_is_within_its_bounds() -> None:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = counts(path.read_text() for path in files)
    assert {rule: found[rule] for rule, bound in BOUNDS.items() if found[rule] > bound} == {}


def test_planted_faults_are_found() -> None:
    long = "word " * (WORDS_MAX + 1)
    planted = f'''"""What it is."""
def f():
    """See `g`."""
    # {long}
    x = 1  # {long}
    y = """
What is no docstring {long}"""
class C:
    """{long}"""
    n: int
    """How many."""
'''
    assert counts([planted]) == {"question": 2, "see": 1, "long": 3}
    fine = f'"""It is whatever.\n\nSee `g` for what follows."""\n# {"word " * WORDS_MAX}. word\n'
    assert counts([fine]) == {}
