"""A model's `tokenizer.json`, tried in a process with limits: `python -m
node.policies.tokenizer_files FILE`.

A tokenizer is a program too: steps that replace text by longer text multiply. Single characters,
patterns of its steps, and long runs have to stay within bounds of length, CPU time and memory."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer

from node.sandbox.confinement import limit
from node.system.child_environment import child_environ
from swarm.errors import ConfigError
from swarm.texts import printable

if TYPE_CHECKING:  # the child does without it
    from transformers import PreTrainedTokenizerBase

CPU_S: Final = 10
WALL_S: Final = 120.0  # a machine may have others to serve
MEMORY_BYTES: Final = 2 * 2**30  # of address space; the largest tokenizers take some 500 MB
GROWTH_MAX: Final = 32  # characters, or tokens, for one; Unicode's own forms have 18
CONSTANT_MAX: Final = 1024  # that may come to any text
RUN_CHARS: Final = 16_384
_PLANES: Final = (range(0xD800), range(0xE000, 0x20000))
_BLOCK: Final = 256
_RUNS: Final = (" ", "a", "1", "\n", "!", "-", "\u00e9", "\u4e2d", "ab ", "a1", "\u0301", "\u2581")
_LINE_CHARS: Final = 200
_REFUSED: Final = 3
TEXT: Final = "Two  blanks,\n\n\ta line: isn't 1,234.5 na\u00efve? \u4e2d\u6587\u304b\u306a"


def check(model: str, file: Path) -> None:
    """Raise ConfigError if this tokenizer of a model comes to a limit, or is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "node.policies.tokenizer_files", str(file)],
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=WALL_S,
            env=child_environ() | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )  # fmt: skip
        status, said = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        status, said = -1, ""
    if status == 0:
        return
    why = (
        said
        if status == _REFUSED
        else f"it ends the trial, or takes over {CPU_S} s or {MEMORY_BYTES >> 30} GiB"
    )
    raise ConfigError(
        f"model {model}: its {file.name} cannot be used: {printable(why, _LINE_CHARS)}"
    )


def check_text(model: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError if blanks, ends of lines or other scripts do not come back from it."""
    told = tokenizer(TEXT, add_special_tokens=False, split_special_tokens=True)
    back = str(
        tokenizer.decode(
            told["input_ids"], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )
    if back.removeprefix(" ") != TEXT:  # which some put before each text
        shown = printable(back, _LINE_CHARS, escapes=True)
        raise ConfigError(f"model {model}: its tokenizer loses text: {TEXT!r} becomes '{shown}'")


def check_covered(
    model: str, tokenizer: "PreTrainedTokenizerBase", rows: int, needed: Iterable[int]
) -> None:
    """Raise ConfigError if text, or one of the ids `needed`, has no row in the embeddings. Special
    tokens may lack one: no text becomes them."""
    special = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {*needed, *(set(tokenizer.get_vocab().values()) - special)}
    if beyond := sorted(each for each in ids if each >= rows):
        raise ConfigError(
            f"model {model}: its embeddings have {rows} rows, and its tokenizer {len(beyond)} "
            f"tokens beyond them, such as {beyond[0]}: they are of two models"
        )


# --- the child -----------------------------------------------------------------------------------


def _within(said: int, made: int) -> bool:
    return made <= CONSTANT_MAX + GROWTH_MAX * said


def _looked_for(found: Any) -> Iterator[str]:
    """Patterns that steps of a tokenizer look for, regular expressions as they are spelled."""
    left = [found]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            pattern = each.get("pattern")
            for text in pattern.values() if isinstance(pattern, dict) else ():
                if isinstance(text, str):
                    yield text
            left += each.values()
        elif isinstance(each, list):
            left += each


def tried(file: Path) -> str | None:
    """The fault of a tokenizer, or None."""
    steps = json.loads(file.read_bytes())
    for part in ("model", "added_tokens"):
        steps.pop(part, None)
    tokenizer = Tokenizer.from_file(str(file))
    if getattr(tokenizer.model, "dropout", None):
        return "its merges are dropped at random: set model.dropout to null in it"
    if (normalizer := tokenizer.normalizer) is not None:
        for plane in _PLANES:
            for code in plane:
                made = len(normalizer.normalize_str(chr(code)))
                if made > GROWTH_MAX:
                    return f"it makes {made} characters of one, U+{code:04X}"
    runs = [(each * RUN_CHARS)[:RUN_CHARS] for each in _RUNS]
    blocks = ["".join(map(chr, plane[at : at + _BLOCK])) for plane in _PLANES
              for at in range(0, len(plane), _BLOCK)]  # fmt: skip
    for text in ["", *(each * 8 for each in _looked_for(steps)), *blocks, *runs]:
        ids = tokenizer.encode(text).ids
        if not _within(4 * len(text), len(ids)):  # a character has up to 4 bytes
            return f"it makes {len(ids)} tokens of {len(text)} characters"
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if not _within(len(text) + len(ids), len(back)):
            return f"it makes {len(back)} characters of {len(ids)} tokens"
    return None


def main(file: str) -> int:
    limit(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    try:
        why = tried(Path(file))
    except Exception as error:  # noqa: BLE001  boundary: the library raises nothing else
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        sys.stdout.write(why)
        sys.stdout.flush()
    os._exit(0 if why is None else _REFUSED)  # its memory need not be given back piece by piece


if __name__ == "__main__":
    main(*sys.argv[1:])
