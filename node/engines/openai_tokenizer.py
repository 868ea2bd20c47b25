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
    done = await trio.run_process(
        [sys.executable, "-m", "node.engines.openai_tokenizer", str(directory)],
        capture_stdout=True,
        capture_stderr=True,
        stdin=subprocess.DEVNULL,
        check=False,
        env=child_environ(),
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = printable(said[-1] if said else f"status {done.returncode}", LINE_CHARS)
        raise ConfigError(f"engine_tokenizer = {directory}: no tokenizer of a model: {why}")
    return done.stdout.decode().strip()


def main() -> None:
    from node.policies.policy import load_tokenizer, tokenizer_fingerprint

    directory = Path(sys.argv[1])
    if not directory.is_dir():  # a name would be looked for on the hub
        raise SystemExit("no such directory")
    try:
        tokenizer = load_tokenizer(str(directory))
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    sys.stdout.write(tokenizer_fingerprint(tokenizer))


if __name__ == "__main__":
    main()
