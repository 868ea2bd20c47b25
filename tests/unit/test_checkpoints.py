"""Checkpoints: whatever moment the process is killed at, a whole one is found."""

import fcntl
import json
from pathlib import Path

import pytest
import trio

from node.engines.scripted import ScriptedPolicy
from node.loops.checkpoints import SAVING_SHARE, Checkpoints, SavingPace
from node.loops.sapo import Progress
from swarm.errors import ChildFailed, ConfigError
from tests.support import run

FACTS = {"run_id": "sums-1", "model": "tiny"}


def checkpoints(directory: Path, keep: int = 2, **facts: str) -> Checkpoints:
    return Checkpoints(directory / "checkpoints", keep, FACTS | facts)


def save(kept: Checkpoints, *rounds: int) -> None:
    async def body() -> None:
        for number in rounds:
            policy = ScriptedPolicy(skill=number / 100)
            await kept.save(Progress(round=number, next_index=4 * number), policy)

    run(body)


def latest_round(kept: Checkpoints) -> int:
    found = kept.latest()
    assert found is not None
    assert (found.directory / "skill").read_text() == str(found.progress.round / 100)
    return found.progress.round


def test_saving_takes_a_small_share_of_the_time() -> None:
    pace, now_s, saving_s = SavingPace(None), 0.0, 0.0
    for done in range(1, 1001):
        now_s += 10.0
        if pace.is_due(done, now_s):
            pace.saved(now_s, now_s + 4.0)
            now_s, saving_s = now_s + 4.0, saving_s + 4.0
    assert 0.9 * SAVING_SHARE < saving_s / now_s <= SAVING_SHARE + 4.0 / now_s


def test_what_is_saved_at_once_is_saved_each_round() -> None:
    pace = SavingPace(None)
    for done in range(1, 5):
        assert pace.is_due(done, float(done))
        pace.saved(float(done), done + 0.001)


def test_a_number_of_rounds_is_kept_to() -> None:
    pace = SavingPace(3)
    pace.saved(0.0, 1000.0)
    assert [done for done in range(1, 10) if pace.is_due(done, 0.0)] == [3, 6, 9]


def test_nothing_is_there_at_first(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).latest() is None
    assert checkpoints(tmp_path).reserved() == 0


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save(kept, 1, 2, 9, 10, 11)
    assert latest_round(checkpoints(tmp_path)) == 11
    found = checkpoints(tmp_path).latest()
    assert found is not None
    assert found.progress == Progress(round=11, next_index=44)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["round-00000010", "round-00000011"]


def test_a_round_saved_again_is_left_as_it_is(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save(kept, 1, 1)
    assert latest_round(kept) == 1


def _no_state(directory: Path) -> None:
    (directory / "state.json").unlink()


def _cut_state(directory: Path) -> None:
    state = directory / "state.json"
    state.write_text(state.read_text()[:-20])


def _empty_state(directory: Path) -> None:
    (directory / "state.json").write_text("")


def _not_renamed(directory: Path) -> None:
    directory.rename(directory.with_suffix(".partial"))


def _other_fields(directory: Path) -> None:
    state = json.loads((directory / "state.json").read_text())
    state["progress"]["colour"] = "blue"
    (directory / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("harm", [_no_state, _cut_state, _empty_state, _not_renamed, _other_fields])
def test_a_broken_one_leaves_the_one_before(tmp_path: Path, harm) -> None:  # type: ignore[no-untyped-def]
    kept = checkpoints(tmp_path)
    save(kept, 1, 2)
    harm(tmp_path / "checkpoints" / "round-00000002")
    assert latest_round(checkpoints(tmp_path)) == 1


def test_a_round_can_be_saved_over_what_a_kill_left_of_it(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save(kept, 1, 2)
    _not_renamed(tmp_path / "checkpoints" / "round-00000002")
    save(kept, 2)
    assert latest_round(kept) == 2
    _no_state(tmp_path / "checkpoints" / "round-00000002")
    save(kept, 2)
    assert latest_round(kept) == 2


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    class Dying(ScriptedPolicy):
        async def save(self, directory: Path) -> None:
            await super().save(directory)
            raise ChildFailed("gone")

    async def body() -> None:
        await kept.save(Progress(round=2), Dying())

    kept = checkpoints(tmp_path)
    save(kept, 1)
    with pytest.raises(ChildFailed):
        run(body)
    assert latest_round(kept) == 1


@pytest.mark.parametrize("fact", ["run_id", "model"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, fact: str) -> None:
    save(checkpoints(tmp_path), 1)
    with pytest.raises(ConfigError, match=f"{fact} .*--data-dir"):
        checkpoints(tmp_path, **{fact: "another"}).latest()


def test_what_is_reserved_survives_and_damage_reads_as_nothing(tmp_path: Path) -> None:
    trio.run(checkpoints(tmp_path).reserve, 12)
    trio.run(checkpoints(tmp_path).reserve, 16)
    assert checkpoints(tmp_path).reserved() == 16
    assert checkpoints(tmp_path).latest() is None
    (tmp_path / "checkpoints" / "next-index").write_text("1x")
    assert checkpoints(tmp_path).reserved() == 0


def test_what_is_held_stays_and_goes_after_a_later_checkpoint(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=1)
    save(kept, 1)
    with kept.held() as held:
        assert held is not None
        save(kept, 2, 3)
        assert (held.directory / "skill").read_text() == "0.01"
        assert len(list((tmp_path / "checkpoints").glob("round-*"))) == 2  # 2 is gone
    save(kept, 4)
    assert not held.directory.exists()
    assert len(list((tmp_path / "checkpoints").glob("round-*"))) == 1


def test_one_that_goes_before_it_is_held_is_not_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checkpoints(tmp_path, keep=1)
    save(kept, 1)
    lock, locked = fcntl.flock, []

    def late(file: object, how: int) -> None:
        if how == fcntl.LOCK_SH and not locked:
            locked.append(how)
            save(kept, 2)  # removes the first, which this reader has open
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with kept.held() as held:
        assert held is not None
        assert held.progress.round == 2


def test_nothing_is_held_where_there_is_nothing(tmp_path: Path) -> None:
    with checkpoints(tmp_path).held() as held:
        assert held is None


def test_an_error_of_who_holds_it_is_theirs(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save(kept, 1)
    with pytest.raises(FileNotFoundError, match="theirs"), kept.held():
        raise FileNotFoundError("theirs")
