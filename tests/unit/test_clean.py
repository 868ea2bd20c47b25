"""What is kept for nodes of this machine can be removed, and nothing else."""

from pathlib import Path

import pytest

from node.cli import main


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    cache = tmp_path / "cache"
    for name in ("models/one/model.safetensors", "policies/tiny/x", "data/a.jsonl", "mine/kept"):
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    (cache / "policies" / "tiny.lock").touch()
    return cache


def left(cache: Path) -> set[str]:
    return {str(each.relative_to(cache)) for each in cache.rglob("*") if each.is_file()}


def test_what_was_fetched_or_made_goes_and_what_is_not_ours_stays(cache: Path, capsys) -> None:
    elsewhere = cache.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_bytes(b"1")
    (cache / "models" / "lent").symlink_to(elsewhere)
    assert main(["clean", "--cache-dir", str(cache), "--yes"]) == 0
    assert left(cache) == {"mine/kept", "policies/tiny.lock"}
    assert (elsewhere / "weights").exists()
    said = capsys.readouterr().out
    assert str(cache / "models" / "one") in said
    assert "removed" in said
    assert main(["clean", "--cache-dir", str(cache), "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_nothing_goes_where_nobody_agrees(cache: Path, capsys, monkeypatch) -> None:
    before = left(cache)
    assert main(["clean", "--cache-dir", str(cache)]) == 0  # no terminal
    assert left(cache) == before
    assert "nothing was removed; --yes agrees" in capsys.readouterr().out


def test_what_cannot_be_removed_is_one_line(cache: Path, capsys, monkeypatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr("node.commands.policy.shutil.rmtree", refuse)
    assert main(["clean", "--cache-dir", str(cache), "--yes"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Permission denied" in error
