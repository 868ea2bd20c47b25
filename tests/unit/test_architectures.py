"""Every causal language model that transformers has: engine, each pass of the trainer, gradient and
export are what the bare model says of each text alone, or it is refused in one line."""

import re
from pathlib import Path

import pytest

from tests.unit.small_models import KINDS, WORDS, outcome

DOCS = Path(__file__).parents[2] / "docs/engines.md"
QUICK = (
    "llama", "gpt2", "gemma3_text", "mistral", "mpt", "lfm2", "mamba", "minicpm3", "bart", "bert",
    "gemma4_text", "deepseek_v3",
)  # fmt: skip


def listed() -> dict[str, str]:
    """The outcome of each kind, by the documentation."""
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    return {kind: told for kinds, told in rows for kind in re.findall(r"`([^`]+)`", kinds)}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS],
)
def test_it_works_or_is_refused_by_name(kind, tmp_path):
    found = outcome(kind, tmp_path)
    assert listed()[kind] == WORDS[found.how], found


def test_the_documentation_lists_every_kind():
    assert set(KINDS) <= listed().keys()
