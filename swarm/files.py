"""Small files that are there whole or not at all."""

from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """
    Raises:
        OSError: what was there before is there still.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # whose mode may be another
    partial.touch(mode=mode)
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
