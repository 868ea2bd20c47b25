"""What a machine has for a node, and how nodes share it. The nodes here are real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from node.engines.vllm.server import (
    CACHE_BLOCK_TOKENS,
    CPU_CACHE_BYTES_MAX,
    CPU_CACHE_BYTES_MIN,
    CPU_CACHE_SHARE,
    SEQUENCES_MAX,
)
from node.engines.vllm.text import ModelText
from node.system import machine
from node.system.machine import (
    THREADS_DEFAULT_MAX,
    core_count,
    counted,
    free_memory_bytes,
    threads_of,
)
from tests.integration.vllm_models import model_directory

NODE = """
import sys
from pathlib import Path
from node.system.machine import counted
with counted(Path(sys.argv[1])) as count:
    print(count(), flush=True)
    for _ in sys.stdin:
        print(count(), flush=True)
"""


@pytest.mark.parametrize(
    ("cores", "nodes", "threads"),
    [
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 3),
        (4, 2, 2),
        (4, 3, 1),
        (2, 3, 1),
        (16, 3, 5),
        (8, 0, 7),
        (8, 1, 7),
        (8, 2, 4),
        (8, 3, 2),
    ],
)
def test_nodes_share_the_cores(cores: int, nodes: int, threads: int) -> None:
    assert threads_of(cores, nodes) == threads
    assert threads_of(64 * cores, nodes) == THREADS_DEFAULT_MAX


class Node:
    """A process that is counted."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.found = self.said()

    def said(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def counts(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@contextmanager
def started(directory: Path) -> Iterator[Node]:
    node = Node(directory)
    with node.process:
        try:
            yield node
        finally:
            node.process.kill()


def test_three_nodes_count_each_other_until_they_end_or_are_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(started(tmp_path)) for _ in range(3))
        assert [each.found for each in (first, second, third)] == [1, 2, 3]
        assert [each.counts() for each in (first, second, third)] == [3, 3, 3]
        third.process.kill()
        third.process.wait(30)
        assert len(list(tmp_path.iterdir())) == 3
        assert [each.counts() for each in (first, second)] == [2, 2]
        assert len(list(tmp_path.iterdir())) == 2  # what the killed one left is gone
        second.end()
        assert first.counts() == 1
        first.end()
    assert not list(tmp_path.iterdir())


def test_what_others_put_there_is_neither_counted_nor_touched(tmp_path: Path) -> None:
    mark = f"swarm-node-{os.getuid()}-"
    target = tmp_path / "elsewhere"
    target.write_text("theirs")
    (tmp_path / f"{mark}link").symlink_to(target)
    (tmp_path / f"{mark}directory").mkdir()
    (tmp_path / f"swarm-node-{os.getuid() + 1}-file").touch()
    (tmp_path / f"{mark}left").touch()  # nobody holds it
    with counted(tmp_path) as count:
        assert count() == 1
    assert target.read_text() == "theirs"
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == sorted(
        ["elsewhere", f"{mark}directory", f"{mark}link", f"swarm-node-{os.getuid() + 1}-file"]
    )


def test_a_node_without_a_place_for_its_lock_counts_itself(tmp_path: Path) -> None:
    with counted(tmp_path / "none") as count:
        assert count() == 1


def test_a_control_group_bounds_cores_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path)
    cores, free = core_count(), free_memory_bytes()
    assert cores >= 1
    assert free > 0
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert core_count() == cores
    assert free_memory_bytes() > 1000
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert core_count() == 1
    assert free_memory_bytes() == 4000
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("500\n")
    assert core_count() == 1
    assert free_memory_bytes() == 0


def test_limits_around_the_own_group_hold_too(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path / "groups")
    monkeypatch.setattr(machine, "_PROCESS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cgroup").write_text("0::/user.slice/node.service\n")
    inner = tmp_path / "groups" / "user.slice" / "node.service"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("300000 100000\n")
    (inner.parent / "memory.max").write_text("5000\n")
    (inner.parent / "memory.current").write_text("1000\n")
    assert core_count() == 3
    assert free_memory_bytes() == 4000
    (inner / "cpu.max").write_text("200000 100000\n")
    assert core_count() == 2


@pytest.mark.parametrize("seen", ["docker/a1", ""])
def test_control_groups_of_version_1_bound_too(seen, tmp_path, monkeypatch):
    """In a container the group of the host's path may be out of view, and the mount is the own."""
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path / "groups")
    monkeypatch.setattr(machine, "_PROCESS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cgroup").write_text("4:memory:/docker/a1\n2:cpu,cpuacct:/docker/a1\n0::/\n")
    cpu, memory = (tmp_path / "groups" / name / seen for name in ("cpu", "memory"))
    for each in (cpu, memory):
        each.mkdir(parents=True)
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (memory / "memory.usage_in_bytes").write_text("1000\n")
    assert core_count() == 8
    assert free_memory_bytes() > 5000
    (cpu / "cpu.cfs_quota_us").write_text("200000\n")
    (memory / "memory.limit_in_bytes").write_text("5000\n")
    (memory / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 500\n")
    assert core_count() == 2
    assert free_memory_bytes() == 4500


def test_what_only_caches_files_is_free_and_what_is_in_shared_memory_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("16000\n")
    (tmp_path / "memory.current").write_text("15000\n")
    assert free_memory_bytes() == 1000  # nothing is said of files
    stat = "anon 1500\nfile 13000\nshmem 3000\ninactive_anon 4500\n"
    (tmp_path / "memory.stat").write_text(f"{stat}inactive_file 8000\nactive_file 2000\n")
    assert free_memory_bytes() == 11_000
    (tmp_path / "memory.stat").write_text(f"{stat}inactive_file max\nactive_file\n\n")
    assert free_memory_bytes() == 1000
    (tmp_path / "memory.stat").write_text("active_file 20000\n")  # read a moment after the other
    assert free_memory_bytes() == 16_000


def test_the_cache_goes_by_the_memory_that_is_free(tmp_path: Path) -> None:
    text = ModelText(model_directory(tmp_path, 1))
    token = 2 * 4 * 2 * 32  # keys and values, fp32, layers, width
    one = token * (1024 + CACHE_BLOCK_TOKENS)
    plenty = 2**50
    assert text.cache_bytes(1024, plenty, 4) == SEQUENCES_MAX * one  # no more than is of use
    assert text.cache_bytes(1024, plenty, 2) == SEQUENCES_MAX * one // 2
    free = 8 * CPU_CACHE_BYTES_MIN
    assert text.cache_bytes(100_000, free, 4) == int(CPU_CACHE_SHARE * free)
    assert text.cache_bytes(100_000, 0, 4) == CPU_CACHE_BYTES_MIN
    assert text.cache_bytes(2_000_000, plenty, 4) == CPU_CACHE_BYTES_MAX
    longest = text.cache_bytes(300_000_000, plenty, 4)
    assert longest == 2 * token * (300_000_000 + CACHE_BLOCK_TOKENS)  # two always fit
