"""The fingerprint of a tokenizer, computed in a child process, because the node's own process
imports neither torch nor transformers."""

import subprocess
import sys
from pathlib import Path

import trio

from node.system.child_environment import child_environ
from swarm.errors import ConfigError
from swarm.texts import printable

LINE_CHARS = 200


async def fingerprint_of(directory: Path) -> str:
    """The fingerprint of a model directory's tokenizer, as a trainer computes it."""
    return await _told(directory)


async def ids_of(model: str, text: str) -> list[int]:
    """The token ids of a text alone, by the tokenizer of a model directory or a hub id."""
    return list(map(int, (await _told(model, text)).split()))


async def _told(directory: Path | str, *text: str) -> str:
    done = await trio.run_process(
        [sys.executable, "-m", "node.engines.openai_tokenizer", str(directory), *text],
        capture_stdout=True,
        capture_stderr=True,
        stdin=subprocess.DEVNULL,
        check=False,
        env=child_environ(),
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = printable(said[-1] if said else f"status {done.returncode}", LINE_CHARS)
        raise ConfigError(f"{directory}: no tokenizer of a model: {why}")
    return done.stdout.decode().strip()


def main() -> None:
    from node.policies.policy import load_tokenizer, tokenizer_fingerprint

    directory, texts = Path(sys.argv[1]), sys.argv[2:]
    if not texts and not directory.is_dir():  # a name would be looked for on the hub
        raise SystemExit("no such directory")
    try:
        tokenizer = load_tokenizer(str(directory))
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    if texts:
        sys.stdout.write(" ".join(map(str, tokenizer.encode(texts[0], add_special_tokens=False))))
    else:
        sys.stdout.write(tokenizer_fingerprint(tokenizer))


if __name__ == "__main__":
    main()
