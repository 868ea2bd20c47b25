"""What scores is confined: real attacks, each of which succeeds where the sandbox is left out."""

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from node.commands import doctor
from node.config import RunConfig
from node.envs import registry, scoring
from node.run import machine
from node.sandbox import confinement, kernel
from node.sandbox.runner_main import lacks_cpu
from node.system.child_process import NUMBER, encode
from node.verify.assignment import assigned_task
from node.verify.verifier import ProcessVerifier
from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError
from swarm.rollouts import RolloutGroup
from tests.support import run as run_async
from tests.unit.sandbox_attacks import SECRET_VARIABLE, attacks
from tests.unit.tasks_support import ALICE, first_tasks, make_config, make_group, make_run
from tests.unit.thieves import thief

CPU_LIMIT_S = 0.5
LAYERS = confinement.found()
pytestmark = [
    pytest.mark.skipif(not LAYERS.is_sandbox, reason="no sandbox on this machine"),
    pytest.mark.slow,
]


@pytest.fixture
def mole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """A run with `mole`, installed where this process and its children look."""
    package = tmp_path / "path" / "mole-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mole\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[swarm_node.environments]\nmole = {attacks.__module__}:Mole\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    for cached in (registry.environment, scoring._problem):
        cached.cache_clear()
    yield make_run({"name": "mole"}, limits={"text_chars_max": 8192})
    for cached in (registry.environment, scoring._problem):
        cached.cache_clear()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder with a node's data directory, and the port of somebody who listens."""
    data = tmp_path / "node"
    data.mkdir()
    for name in ("key", "spare"):
        (data / name).write_text("secret")
    (tmp_path / "path").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(data / "socket"))
        local.listen()
        yield tmp_path, server.getsockname()[1]


def group(run: RunConfig, *codes: str) -> RolloutGroup:
    return make_group(run, *(code.encode().hex() for code in codes))


Body = Callable[[ProcessVerifier], Awaitable[None]]


def with_verifier(
    run: RunConfig, folder: Path, body: Body, *, sandbox: str, cpu_s: float = CPU_LIMIT_S
) -> None:
    async def main() -> None:
        config = make_config(run, verify_cpu_s=cpu_s, verify_sandbox=sandbox)
        config = config.model_copy(update={"data_dir": folder / "node"})
        async with ProcessVerifier.open(config) as verifier:
            await body(verifier)

    run_async(main)


def nameless(names: dict[str, list[str]], numbers: dict[str, dict[str, int]]) -> set[str]:
    known = {name for of_machine in numbers.values() for name in of_machine}
    return {name for part in names.values() for name in part} - known


def test_a_misspelled_call_in_a_filter_would_be_noticed() -> None:
    """A filter passes over names without a number, as a machine lacks some calls."""
    calls = tomllib.loads(Path(kernel.__file__).with_name("system_calls.toml").read_text("utf-8"))
    numbers = calls["numbers"]
    assert not nameless(calls["refused"] | calls["more"], numbers)
    assert nameless({"network": ["socket", "conect"]}, numbers) == {"conect"}
    for of_machine in numbers.values():
        assert all(type(number) is int for number in of_machine.values())
        assert len(set(of_machine.values())) == len(of_machine)


@pytest.mark.parametrize("cell", ["all", "view", "landlock"])
def test_no_attack_succeeds_whichever_layer_is_missing(cell: str, world: tuple[Path, int]) -> None:
    told = tried(cell, world)
    assert told["succeeded"] == []
    assert told["layers"] == [
        LAYERS.view and cell != "view", LAYERS.landlock if cell != "landlock" else 0, True
    ]  # fmt: skip
    assert (world[0] / "node" / "spare").read_text() == "secret"


def test_every_attack_succeeds_without_a_sandbox(world: tuple[Path, int]) -> None:
    missing = set(attacks(*world)) - set(tried("none", world)["succeeded"])
    assert missing <= ({"list home"} if os.getuid() else set())


def tried(cell: str, world: tuple[Path, int]) -> dict[str, list[object]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sandbox_attacks", cell, *map(str, world)],
        capture_output=True, timeout=60, check=True, text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_scorer_that_runs_texts_reaches_nothing(
    sandbox: str, mole: RunConfig, world: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the production verifier, whose worker imported the plug-in in the sandbox too."""
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    texts = attacks(*world)

    async def body(verifier: ProcessVerifier) -> None:
        rewards = (await verifier.verify(group(mole, "pass", *texts.values())))[1]
        done = [name for name, each in zip(texts, rewards[1:], strict=True) if each]
        assert rewards[0] == 1.0
        assert done == [] if sandbox == "auto" else len(done) > len(texts) / 2
        secret = f"import os\nos.environ[{SECRET_VARIABLE!r}]"
        found = (await verifier.verify(group(mole, secret)))[1]
        assert found == ((0.0,) if sandbox == "auto" else (1.0,))
        assert verifier.counters.starts == 1

    with_verifier(mole, world[0], body, sandbox=sandbox, cpu_s=2.0)  # of so many forks


@pytest.mark.parametrize("sandbox", ["auto", "off"])
@pytest.mark.parametrize("together", [True, False])
def test_a_text_finds_nothing_of_others_in_its_scorer(
    together: bool, sandbox: str, mole: RunConfig, tmp_path: Path
) -> None:
    """Neither of those of its own group nor of those scored before. Each thief succeeds where all
    are scored in one process."""
    (tmp_path / "node").mkdir()
    kinds = ("frames", "objects that the collector knows", "the heap")
    thieves = [f"{thief(kind)}\nassert solve(0)" for kind in kinds]
    honest = "left = 'MARK:0123456789abcdef'\nassert left"

    async def body(verifier: ProcessVerifier) -> None:
        if together:
            found = (await verifier.verify(group(mole, honest, *thieves, honest)))[1]
        else:
            found = (await verifier.verify(group(mole, honest)))[1]
            found += (await verifier.verify(group(mole, *thieves, honest)))[1]
        assert (found[0], found[-1]) == (1.0, 1.0)
        if sandbox == "auto":
            assert found[1:-1] == (0.0, 0.0, 0.0)
        elif together:
            assert 1.0 in found[1:-1]

    with_verifier(mole, tmp_path, body, sandbox=sandbox, cpu_s=2.0)


SLEEPS = {
    "a little each": "import time\ntime.sleep(0.2)",
    "for long": "import time\ntime.sleep(30)",
    "with no pipe left": "import os, time\nos.closerange(3, 64)\ntime.sleep(30)",
}


@pytest.mark.parametrize("text", SLEEPS.values(), ids=SLEEPS)
def test_a_scorer_in_which_texts_wait_is_cut_off_and_blamed(
    text: str, mole: RunConfig, tmp_path: Path
) -> None:
    """A scorer may wait, so what waits in it pays; its worker stays."""
    (tmp_path / "node").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(
        "import sys\nif 'verifier_worker' in ' '.join(sys.orig_argv):\n"
        "    from node.sandbox import runner_main\n    runner_main._PROBE_FACTOR_MAX = 1e9\n"
    )  # whatever else this machine does

    async def body(verifier: ProcessVerifier) -> None:
        assert (await verifier.verify(group(mole, "pass")))[1] == (1.0,)
        waits = group(mole, *[text] * 16)
        for _ in range(3):
            with pytest.raises(RemoteProtocolError) as refused:
                await verifier.verify(waits)
            assert refused.value.reason is Reject.OVERRUN
        assert (await verifier.verify(group(mole, "pass")))[1] == (1.0,)
        assert verifier.counters.starts == 1
        assert verifier.counters.second_tries == 0

    with_verifier(mole, tmp_path, body, sandbox="auto", cpu_s=2.0)


def test_it_is_told_where_a_machine_has_no_core_left() -> None:
    """Beside a process on the same core; none of them is to be blamed for it."""
    cores = os.sched_getaffinity(0)
    beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        one = {min(cores)}
        for pid in (0, beside.pid):
            os.sched_setaffinity(pid, one)
        assert any(lacks_cpu() for _ in range(100))
    finally:
        os.sched_setaffinity(0, cores)
        beside.kill()
        beside.wait()


@pytest.mark.usefixtures("mole")
def test_a_group_of_more_than_a_pipe_holds_is_scored_whole(tmp_path: Path) -> None:
    """Beside a plug-in a built-in environment has a fork for each group, which reads in parts."""
    (tmp_path / "node").mkdir()
    run = make_run({"name": "mole"}, {"name": "scripted_sum"})

    async def body(verifier: ProcessVerifier) -> None:
        task = next(t for t in first_tasks(run, ALICE, 64) if t.environment == "scripted_sum")
        (posed,) = await verifier.problems([task])
        texts = [posed.answer, *["x" * 8_000] * 24]
        assert (await verifier.verify(make_group(run, *texts, task=task)))[1] == (1.0, *[0.0] * 24)
        assert await verifier.score([task], [texts]) == [(1.0, *[0.0] * 24)]

    with_verifier(run, tmp_path, body, sandbox="auto", cpu_s=8.0)


def test_what_is_counted_for_all_is_out_of_a_texts_reach(mole: RunConfig, tmp_path: Path) -> None:
    """A plug-in's fork shares no memory with the next one."""
    (tmp_path / "node").mkdir()
    upset = (
        "import gc, mmap\nfor each in gc.get_objects():\n"
        "    for held in gc.get_referents(each):\n"
        "        if type(held) is mmap.mmap and not held.closed:\n"
        "            held[:16] = b'\\xff' * 16"
    )

    async def body(verifier: ProcessVerifier) -> None:
        assert (await verifier.verify(group(mole, upset, "pass")))[1] == (1.0, 1.0)
        assert (await verifier.verify(group(mole, "pass")))[1] == (1.0,)
        assert verifier.counters.starts == 1

    with_verifier(mole, tmp_path, body, sandbox="auto")


FORGE = """
import os
frame = bytes.fromhex({frames!r})
for each in range(3, 64):
    try:
        os.write(each, frame)
    except OSError:
        pass
"""


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_text_does_not_answer_for_the_scorer(
    sandbox: str, mole: RunConfig, tmp_path: Path
) -> None:
    """It writes what the worker would say of the groups to come into every pipe that it finds."""
    said = [["?", [1.0], 0, "", 0.0, False]]
    frames = b"".join(encode({"ok": said, "cpu_s": 0.0, NUMBER: each}) for each in range(3, 9))
    forge = FORGE.format(frames=frames.hex())
    (tmp_path / "node").mkdir()

    async def body(verifier: ProcessVerifier) -> None:
        found = []
        for text in ("pass", forge, "1 / 0", "1 / 0"):
            try:
                found.append((await verifier.verify(group(mole, text)))[1])
            except (ChildFailed, RemoteProtocolError):
                found.append(None)
        assert found[0] == (1.0,)
        if sandbox == "auto":
            assert found[2:] == [(0.0,), (0.0,)]
        else:
            assert (1.0,) in found[2:]

    with_verifier(mole, tmp_path, body, sandbox=sandbox)


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_who_disarms_its_timer_is_cut_off_and_blamed(
    sandbox: str, mole: RunConfig, tmp_path: Path
) -> None:
    spin = (
        "import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "signal.setitimer(signal.ITIMER_PROF, 0)\nwhile True:\n    pass"
    )
    (tmp_path / "node").mkdir()

    async def body(verifier: ProcessVerifier) -> None:
        assert (await verifier.verify(group(mole, "pass")))[1] == (1.0,)
        if sandbox == "auto":
            with pytest.raises(RemoteProtocolError) as refused:
                await verifier.verify(group(mole, spin))
            assert refused.value.reason is Reject.OVERRUN
        else:
            with pytest.raises(ChildFailed):
                await verifier.verify(group(mole, spin))
        assert (await verifier.verify(group(mole, "pass")))[1] == (1.0,)
        assert verifier.counters.starved == (0 if sandbox == "auto" else 1)

    with_verifier(mole, tmp_path, body, sandbox=sandbox)


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_who_ends_others_ends_nobody(sandbox: str, mole: RunConfig, tmp_path: Path) -> None:
    """A worker that somebody killed would be nobody's fault."""
    kill = f"import os\nos.kill(os.getppid(), {int(signal.SIGKILL)})"
    own = f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})"
    (tmp_path / "node").mkdir()

    async def body(verifier: ProcessVerifier) -> None:
        for text in (kill, own):
            if sandbox == "auto":
                assert (await verifier.verify(group(mole, text, "pass")))[1] == (0.0, 1.0)
            else:
                with suppress(ChildFailed):  # unless the answer was quicker
                    await verifier.verify(group(mole, text, "pass"))
        assert (await verifier.verify(group(mole, "pass")))[1] == (1.0,)
        assert (verifier.counters.starts > 1) == (sandbox == "off")

    with_verifier(mole, tmp_path, body, sandbox=sandbox)


def test_nothing_is_left_for_the_next_and_what_is_left_is_bounded(
    mole: RunConfig, tmp_path: Path
) -> None:
    leave = "import os, builtins\nopen(os.environ['TMPDIR'] + '/x', 'w').write('x')\nbuiltins.x = 1"
    look = "import os\nassert os.listdir(os.environ['TMPDIR'])"
    fill = (
        "import os\nfor i in range(9):\n"
        "    open(os.environ['TMPDIR'] + f'/{i}', 'wb').write(b'x' * 2**23)"
    )
    flood = "import os\nfiles = [open(os.devnull) for _ in range(100)]"
    (tmp_path / "node").mkdir()

    async def body(verifier: ProcessVerifier) -> None:
        if LAYERS.view:
            both = f"{leave}\n{look}"
            assert (await verifier.verify(group(mole, both, look)))[1] == (1.0, 0.0)
        assert (await verifier.verify(group(mole, look, "x")))[1] == (0.0, 0.0)
        assert (await verifier.verify(group(mole, fill, flood)))[1] == (0.0, 0.0)

    with_verifier(mole, tmp_path, body, sandbox="auto")


_AT_SCRATCH = "import fcntl, os, struct\nT = os.environ['TMPDIR']\n"
_ANYTHING = "assert os.listdir(T)"
NOTES = {  # how a text leaves one for the next, and how that would find it
    "mode": ("os.chmod(T, 0o555)", "assert os.stat(T).st_mode & 0o777 != 0o700"),
    "no mode": ("os.chmod(T, 0)", "assert os.stat(T).st_mode & 0o777 != 0o700"),
    "time": ("os.utime(T, (1, 12345))", "assert os.stat(T).st_mtime == 12345"),
    "attribute": ("os.setxattr(T, 'user.note', b'x')", "assert os.listxattr(T)"),
    "flag": (
        "fcntl.ioctl(os.open(T, 0), 0x40086602, struct.pack('l', 0x40))",
        "assert fcntl.ioctl(os.open(T, 0), 0x80086601, bytes(8))[0] & 0x40",
    ),
    "closed folder": (
        "os.mkdir(f'{T}/d')\nopen(f'{T}/d/note', 'w')\nos.chmod(f'{T}/d', 0)", _ANYTHING
    ),
    "deep folders": ("os.chdir(T)\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')", _ANYTHING),
}  # fmt: skip


@pytest.mark.skipif(not LAYERS.view, reason="there is no scratch folder here")
def test_what_a_text_makes_of_the_scratch_folder_tells_the_next_nothing(
    mole: RunConfig, tmp_path: Path
) -> None:
    """And ends no worker, which whoever comes next would have to wait for."""
    (tmp_path / "node").mkdir()

    async def body(verifier: ProcessVerifier) -> None:
        for kind, (leave, look) in NOTES.items():
            texts = (_AT_SCRATCH + leave, _AT_SCRATCH + look, "pass")
            with suppress(RemoteProtocolError):  # no flags there, or it took too long
                found = (await verifier.verify(group(mole, *texts)))[1]
                assert found[1:] == (0.0, 1.0), kind
            assert (await verifier.verify(group(mole, *texts[1:])))[1] == (0.0, 1.0), kind
        assert verifier.counters.starts == 1

    with_verifier(mole, tmp_path, body, sandbox="auto")


def test_threads_and_pairs_of_sockets_are_left_to_scorers(mole: RunConfig, tmp_path: Path) -> None:
    """What a scorer with an event loop takes."""
    loop = "import asyncio\nasyncio.run(asyncio.to_thread(sum, [1]))"
    (tmp_path / "node").mkdir()

    async def body(verifier: ProcessVerifier) -> None:
        assert (await verifier.verify(group(mole, loop)))[1] == (1.0,)

    with_verifier(mole, tmp_path, body, sandbox="auto")


def test_what_a_worker_says_is_looked_at(mole: RunConfig, tmp_path: Path) -> None:
    """A text that takes over its own fork answers with what is no verdict: it is refused, and the
    node goes on."""
    takes_over = (
        "import os\n"
        "from node.system.child_process import encode\n"
        "for pipe in range(3, 64):\n"
        "    try:\n"
        "        os.write(pipe, encode({'ok': [[7, [9.0], 'x', float('nan')]]}))\n"
        "    except OSError:\n"
        "        pass\n"
        "os._exit(0)"
    )
    (tmp_path / "node").mkdir()

    async def body(verifier: ProcessVerifier) -> None:
        with pytest.raises(RemoteProtocolError) as refused:
            await verifier.verify(group(mole, takes_over))
        assert refused.value.reason is Reject.UNVERIFIABLE
        assert (await verifier.verify(group(mole, "pass")))[1] == (1.0,)

    with_verifier(mole, tmp_path, body, sandbox="auto")


def test_without_a_sandbox_a_run_that_needs_one_is_left_and_others_go_on(
    mole: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker finds nothing that confines, as on an old kernel."""
    planted = tmp_path / "path" / "sitecustomize.py"
    planted.write_text(
        "import sys\nif 'verifier_worker' in ' '.join(sys.orig_argv):\n"
        "    from node.sandbox import kernel\n    kernel.NUMBERS.clear()\n"
    )
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(confinement, "found", lambda: confinement.NONE)

    async def refused(verifier: ProcessVerifier) -> None:
        with pytest.raises(ConfigError, match="need a sandbox"):
            await verifier.problems([assigned_task(mole, ALICE, 0)])

    async def works(verifier: ProcessVerifier) -> None:
        assert (await verifier.verify(make_group(make_run(), "no")))[1] == (0.0,)

    with_verifier(mole, tmp_path, refused, sandbox="auto")
    with_verifier(make_run(), tmp_path, works, sandbox="auto")


@pytest.mark.parametrize("layers", [LAYERS, confinement.NONE, confinement.Layers(landlock=7)])
def test_the_doctor_and_a_node_say_what_there_is(
    layers: confinement.Layers, mole: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (doctor, machine):
        monkeypatch.setattr(module, "found", lambda: layers)

    def level(run: RunConfig, sandbox: str = "auto") -> str:
        return doctor.check_sandbox(make_config(run, verify_sandbox=sandbox)).level

    assert level(make_run()) == ("ok" if layers.is_sandbox else "warn")
    assert level(mole) == ("ok" if layers.is_sandbox else "fail")
    assert level(mole, "off") == "warn"
    told = doctor.check_sandbox(make_config(mole)).line()
    assert ("seccomp" in told) == layers.calls
    assert ('or "off" to trust all' in told) == (not layers.is_sandbox)

    said: list[str] = []

    async def main() -> None:
        world = machine.RealWorld("", lambda: 1, said.append)
        async with world.open_verifier(make_config(make_run())):
            assert len(said) == (0 if layers.is_sandbox else 1)
        opened = world.open_verifier(make_config(mole))
        if layers.is_sandbox:
            async with opened:
                return
        with pytest.raises(ConfigError, match="run test: its environments need a sandbox"):
            await opened.__aenter__()

    run_async(main)
