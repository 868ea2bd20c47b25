"""Run a fuzz target: `python -m tests.fuzz codec --runs 1000000`. `make fuzz` calls this.

A run is a child process under atheris, which ends at the first finding. What it finds new goes to
`out/fuzz`; `--minimise` takes from there into the committed corpus what covers more.
"""

import argparse
import importlib
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from types import ModuleType

from tests.fuzz.harness import (
    CPU_S_MAX,
    Finding,
    Watch,
    keep_finding,
    load_figures,
    save_figures,
)

TARGETS = ("codec", "streams", "connections", "gossip", "multistream", "answers")
CORPUS = Path(__file__).parent / "corpus"
OUT = Path("out/fuzz")
# The reference is pure Python: its branches lead to MessagePack that compiled code hides.
INSTRUMENTED = {
    "codec": ["swarm", "tests.wire_reference"],
    "streams": ["swarm", "libp2p.pubsub"],
    "connections": ["swarm", "libp2p.stream_muxer", "libp2p.security"],
    "gossip": ["swarm.transport"],
    "multistream": ["swarm.transport"],
    "answers": ["node.envs.answers", "tests.answers_reference"],
}
SAVE_EVERY = 500  # executions
HANG_S = 300  # of wall time: an input that never ends, on however busy a machine
TREE_SHARE = 0.7  # of mutations that change a message as a tree


def load(target: str) -> ModuleType:
    return importlib.import_module(f"tests.fuzz.fuzz_{target}")


def replay(target: str, path: Path) -> int:
    """Judge one file, or every file of a folder; the exit status."""
    watch = Watch(load(target).check)
    for each in sorted(path.iterdir()) if path.is_dir() else [path]:
        try:
            watch.judge(each.read_bytes())
        except Finding as finding:
            print(f"{each}: {finding}")
            return 1
    slowest_ms = 1000 * watch.figures.slowest_s
    print(f"{watch.figures.executions} inputs: no finding, slowest {slowest_ms:.1f} ms of CPU")
    return 0


def write_seeds(target: str) -> int:
    """Write the seeds that the corpus lacks."""
    for name, data in load(target).seeds().items():
        path = CORPUS / target / f"{name}.bin"
        if not path.exists():
            path.write_bytes(data)
    return 0


def write_again(path: Path, target: str) -> Path:
    """A program that is this child again: a merge starts it by its first argument, in a shell, and
    this module is no program."""
    command = shlex.join([sys.executable, "-m", "tests.fuzz", target, "--child"])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path.absolute()


def fuzz_here(target: str, runs: int, arguments: list[str]) -> None:
    """In the child: fuzz until `runs` or a finding, and exit."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED[target]):
        module = load(target)
    watch = Watch(module.check)
    folder = OUT / target

    def judge(data: bytes) -> None:
        try:
            watch.judge(data)
        except Finding as finding:
            save_figures(folder / "figures.json", watch.figures)
            path = keep_finding(folder / "findings", data, finding)
            print(f"{finding}\nreplay: python -m tests.fuzz {target} --replay {path}", flush=True)
            raise
        done = watch.figures.executions
        if done % SAVE_EVERY == 0 or done == runs:
            save_figures(folder / "figures.json", watch.figures)

    def mutate(data: bytes, bytes_max: int, seed: int) -> bytes:
        random = Random(seed)
        changed = module.mutate(data, random) if random.random() < TREE_SHARE else None
        if changed is None:
            return bytes(atheris.Mutate(data, len(data)))
        return bytes(changed[:bytes_max])

    folder.mkdir(parents=True, exist_ok=True)
    again = write_again(folder / "again", target)
    atheris.Setup([str(again), *arguments], judge, custom_mutator=mutate)
    atheris.Fuzz()


def fuzz(target: str, runs: int, seed: int) -> int:
    """Fuzz in a child process and print the figures; the exit status."""
    folder = OUT / target
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").unlink(missing_ok=True)
    arguments = [
        f"-runs={runs}",
        f"-seed={seed}",
        f"-max_len={load(target).INPUT_BYTES_MAX}",
        f"-timeout={HANG_S}",
        "-rss_limit_mb=0",
        "-print_final_stats=0",
        f"-artifact_prefix={folder}/",
        str(corpus),
        str(CORPUS / target),
    ]
    started_s = time.perf_counter()
    child = [sys.executable, "-m", "tests.fuzz", target, "--runs", str(runs), "--child", *arguments]
    log_path = folder / "log.txt"
    with log_path.open("w") as log:
        status = subprocess.run(child, stdout=log, stderr=log, check=False).returncode
    taken_s = time.perf_counter() - started_s
    report(target, folder, taken_s)
    if status:
        print(f"FOUND something; the end of {log_path}:")
        print("\n".join(log_path.read_text(errors="replace").splitlines()[-40:]))
    return 1 if status else 0


def report(target: str, folder: Path, taken_s: float) -> None:
    figures = load_figures(folder / "figures.json")
    committed = list((CORPUS / target).iterdir())
    print(
        f"{target}: {figures.executions} executions in {taken_s:.0f} s "
        f"({figures.executions / taken_s:.0f}/s), "
        f"slowest {1000 * figures.slowest_s:.1f} ms of CPU (limit {1000 * CPU_S_MAX:.0f}), "
        f"memory grew {figures.growth_bytes / 2**20:.1f} MiB after the warm-up, "
        f"corpus {len(committed)} files ({sum(f.stat().st_size for f in committed)} bytes), "
        f"{len(list((folder / 'corpus').iterdir()))} inputs new in {folder / 'corpus'}"
    )


def minimise(target: str) -> int:
    """Replace the corpus by the fewest, smallest inputs that cover as much; seeds and those
    with a dash in their names stay."""
    folder, kept = OUT / target, OUT / target / "merged"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    sources = [str(CORPUS / target), str(folder / "corpus")]
    child = [sys.executable, "-m", "tests.fuzz", target, "--child", "-merge=1", str(kept), *sources]
    if subprocess.run(child, check=False).returncode:
        return 1
    seeds = load(target).seeds()
    for path in (CORPUS / target).iterdir():
        if "-" not in path.name and path.stem not in seeds:
            path.unlink()
    known = {path.read_bytes() for path in (CORPUS / target).iterdir()}
    for path in kept.iterdir():
        if path.read_bytes() not in known:
            shutil.copy(path, CORPUS / target / f"{path.name[:16]}.bin")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, metavar="PATH")
    parser.add_argument("--seeds", action="store_true", help="write seeds that the corpus lacks")
    parser.add_argument("--minimise", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.child:
        fuzz_here(arguments.target, arguments.runs, rest)
    if rest:
        parser.error(f"unknown: {rest}")
    if arguments.replay:
        return replay(arguments.target, arguments.replay)
    if arguments.seeds:
        return write_seeds(arguments.target)
    if arguments.minimise:
        return minimise(arguments.target)
    return fuzz(arguments.target, arguments.runs, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
