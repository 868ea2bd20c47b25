"""Small files that are there whole or not at all."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """
    Raises:
        OSError: what was there before is there still.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
