"""What whoever has the page's token can do with a coordinator, and what is refused in words."""

from pathlib import Path

import pytest

from coordinator.dashboard import guarded_by
from coordinator.overrides import DRAINED_FILE, NAMES_TOLD_MAX, read_drained
from coordinator.view import save_state
from swarm.errors import ConfigError

TOKEN = "sixteen letters or more"


def seen(data_dir: Path, *names: str) -> None:
    """The coordinator has seen these; one without a name goes by its peer id."""
    save_state(
        data_dir, {"workers": [{"name": name, "peer": f"peer-{n}"} for n, name in enumerate(names)]}
    )


def test_a_drain_that_would_do_nothing_is_refused_with_the_names_that_are_known(
    tmp_path: Path,
) -> None:
    drain = guarded_by(TOKEN, tmp_path).actions["drain"]
    with pytest.raises(ConfigError, match="no coordinator has worked here"):
        drain({"worker": "spot-1"})
    seen(tmp_path)
    with pytest.raises(ConfigError, match="known: none yet"):
        drain({"worker": "spot-1"})
    seen(tmp_path, "spot-1", "")
    with pytest.raises(ConfigError, match=r"spot-2: .*known: peer-1, spot-1$"):
        drain({"worker": "spot-2"})
    assert read_drained(tmp_path) == frozenset()
    for name in ("spot-1", "peer-0", "peer-1"):
        assert name in drain({"worker": name})
    assert read_drained(tmp_path) == {"spot-1", "peer-0", "peer-1"}
    seen(tmp_path, *(f"w{n:02}" for n in range(NAMES_TOLD_MAX + 5)))
    with pytest.raises(ConfigError, match=r"w07 and 5 more$"):
        drain({"worker": "w"})


def test_who_was_drained_may_work_again_though_nobody_knows_it_any_more(tmp_path: Path) -> None:
    actions = guarded_by(TOKEN, tmp_path).actions
    seen(tmp_path, "spot-1")
    actions["drain"]({"worker": "spot-1"})
    seen(tmp_path)
    actions["activate"]({"worker": "spot-1"})
    assert read_drained(tmp_path) == frozenset()


def test_a_disk_that_takes_nothing_is_told_of(tmp_path: Path) -> None:
    actions = guarded_by(TOKEN, tmp_path).actions
    seen(tmp_path, "spot-1")
    (tmp_path / f"{DRAINED_FILE}").mkdir()  # nothing can be put in its place
    with pytest.raises(ConfigError):
        actions["drain"]({"worker": "spot-1"})
    nowhere = tmp_path / "file"
    nowhere.touch()
    with pytest.raises(ConfigError, match="nothing has changed"):
        guarded_by(TOKEN, nowhere).actions["depth"]({"depth": 3})
