"""Checkpoints: whatever moment the process is killed at, a whole one is found."""

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.observe.event_log import FILE_NAME, EventLog, read_events
from node.observe.live import event_line
from node.observe.records import StartEnded
from node.run import app
from node.run.checkpoints import SAVING_SHARE, Checkpoints, SavingPace
from node.run.learner_role import LearnerRole
from node.run.progress import Progress
from node.run.role import Role, TrainingRole, checkpoints_of
from node.run.sapo_role import SapoRole
from node.run.validation import Validated
from node.run.worker_role import WorkerRole
from swarm.errors import ChildFailed, ConfigError
from tests.support import run
from tests.unit.monitor_records import snapshot

FACTS = {"run_id": "sums-1", "model": "tiny"}


def checkpoints(directory: Path, keep: int = 2, **facts: str) -> Checkpoints:
    return Checkpoints(directory / "checkpoints", keep, FACTS | facts)


def save(kept: Checkpoints, *rounds: int) -> None:
    async def body() -> None:
        for number in rounds:
            policy = ScriptedPolicy(skill=number / 100)
            await kept.save(Progress(round=number, next_index=4 * number), policy)

    run(body)


def test_a_round_is_written_again_for_what_comes_with_it(tmp_path: Path) -> None:
    kept, progress = checkpoints(tmp_path), Progress(round=3)

    async def body() -> list[Path]:
        policy = ScriptedPolicy(skill=0.03)
        return [
            await kept.save(progress, policy, {"intake": lambda told=told: told})
            for told in (b"leased", b"here")
        ]

    first, again = run(body)
    assert first == again
    assert (again / "intake").read_bytes() == b"here"
    assert latest_round(kept) == 3


def latest_round(kept: Checkpoints) -> int:
    found = kept.latest()
    assert found is not None
    assert (found.directory / "skill").read_text() == str(found.progress.round / 100)
    return found.progress.round


def test_a_node_that_comes_back_tells_its_round_before_its_policy_is_loaded(tmp_path: Path) -> None:
    """An alarm over the last rounds would count those of before the restart."""
    world: Any = SimpleNamespace(run_sync=None)
    nothing: Any = None
    rules = {"name": "sums", "environments": [{"name": "scripted_sum", "parameters": {"max": 9}}]}
    config = NodeConfig(run=RunConfig.model_validate(rules), data_dir=tmp_path)
    assert TrainingRole(world, config, nothing, nothing).status(snapshot(round=0)).round == 0
    save(checkpoints_of(config), 7)
    assert TrainingRole(world, config, nothing, nothing).status(snapshot(round=0)).round == 7


def test_a_directory_of_another_run_is_refused_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making one takes a minute."""
    save(checkpoints(tmp_path), 7)
    rules = {"name": "sums", "environments": [{"name": "scripted_sum", "parameters": {"max": 8}}]}
    config = NodeConfig(run=RunConfig.model_validate(rules), data_dir=tmp_path)
    made: list[NodeConfig] = []
    monkeypatch.setattr(app, "resolve_model", lambda config, _: made.append(config))
    monkeypatch.setattr(app, "have_data", lambda *_: None)
    view: Any = None
    with pytest.raises(ConfigError, match="its checkpoint has run_id 'sums-1'"):
        app.run_node(config, view, lambda _: None)
    assert not made


@pytest.mark.parametrize(
    ("engine", "role", "told"),
    [
        ("torch", SapoRole, "no checkpoint of that round"),
        ("openai", SapoRole, "only a node that learns by itself"),
        ("torch", WorkerRole, "only a node that learns by itself"),
        ("torch", LearnerRole, "only a node that learns by itself"),
    ],
)
def test_a_fork_that_is_refused_leaves_no_directory(
    engine: Any, role: type[Role], told: str, tmp_path: Path
) -> None:
    rules = {"name": "sums", "environments": [{"name": "scripted_sum", "parameters": {"max": 9}}]}
    config = NodeConfig(
        run=RunConfig.model_validate(rules),
        data_dir=tmp_path / "new",
        fork=f"{tmp_path}/old@7",
        engine=engine,
        engine_url="http://127.0.0.1:1/v1" if engine == "openai" else None,
    )
    view: Any = None
    with pytest.raises(ConfigError, match=told):
        app.run_node(config, view, lambda _: None, role)
    assert not list(tmp_path.iterdir())


def test_the_log_tells_how_a_start_ended(tmp_path: Path) -> None:
    def end(error: Exception | None) -> None:
        with EventLog(tmp_path / FILE_NAME, lambda: 1.0) as events, app._ending(events):
            if error is not None:
                raise error

    end(None)
    with pytest.raises(ExceptionGroup):
        end(ExceptionGroup("nursery", [ConfigError("no peer answered")]))
    found = [record for _, record in read_events(tmp_path / FILE_NAME)]
    assert found == [StartEnded(None), StartEnded("no peer answered")]
    assert [event_line(each).plain for each in found] == ["the node left", "! no peer answered"]


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


def test_a_policy_that_nothing_was_trained_on_is_not_written_again(tmp_path: Path) -> None:
    kept, policy = checkpoints(tmp_path), ScriptedPolicy(skill=0.5)

    async def body(round_: int, version: int | None) -> int:
        saved = await kept.save(Progress(round=round_), policy, version=version)
        return (saved / "skill").stat().st_ino

    first = run(body, 1, 7)
    assert run(body, 2, 7) == first
    assert run(body, 3, 7) == first  # of round 1 nothing is left
    found = checkpoints(tmp_path).latest()
    assert found is not None
    assert found.progress.round == 3
    assert (found.directory / "skill").read_text() == "0.5"
    assert run(body, 4, 8) != first  # trained
    whole = run(body, 5, None)  # of no known version
    assert run(body, 6, 8) != whole


def test_a_policy_whose_last_checkpoint_is_gone_is_written(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)

    async def body() -> None:
        shutil.rmtree(await kept.save(Progress(round=1), ScriptedPolicy(skill=0.01), version=7))
        await kept.save(Progress(round=2), ScriptedPolicy(skill=0.02), version=7)

    run(body)
    assert latest_round(kept) == 2


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


# --- the best ------------------------------------------------------------------------------------


def save_best(kept: Checkpoints, number: int, same: Path | None = None) -> None:
    best = Progress(round=number, validated=Validated(best=number / 100, best_tasks=64))

    async def body() -> None:
        await kept.save_best(best, ScriptedPolicy(skill=number / 100), same)

    run(body)


def best_round(kept: Checkpoints) -> int:
    found = kept.best()
    assert found is not None
    assert (found.directory / "skill").read_text() == str(found.progress.round / 100)
    assert found.progress.validated.best == found.progress.round / 100
    return found.progress.round


def names(directory: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob(pattern))


def test_the_best_is_apart_from_the_number_kept(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    assert kept.best() is None
    save(kept, 1)
    save_best(kept, 2)
    save(kept, 3, 4, 5)
    assert best_round(checkpoints(tmp_path)) == 2
    assert (tmp_path / "checkpoints" / "best" / "skill").read_text() == "0.02"
    assert names(tmp_path, "round-*") == ["round-00000004", "round-00000005"]
    assert latest_round(kept) == 5
    save_best(kept, 6)
    assert best_round(kept) == 6
    assert len(names(tmp_path, "best-*")) == 1


def test_the_best_of_a_round_that_is_done_again_takes_the_place_of_the_first(
    tmp_path: Path,
) -> None:
    kept = checkpoints(tmp_path)
    save_best(kept, 2)
    first = kept.best()
    save_best(kept, 2)
    second = kept.best()
    assert first is not None
    assert second is not None
    assert first.directory != second.directory
    assert best_round(kept) == 2
    assert len(names(tmp_path, "best-*")) == 1


def test_the_files_of_a_checkpoint_of_the_same_policy_are_not_written_twice(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save(kept, 2)
    (same,) = (tmp_path / "checkpoints").glob("round-*")
    save_best(kept, 2, same)
    found = kept.best()
    assert found is not None
    assert (found.directory / "skill").samefile(same / "skill")
    assert not (found.directory / "state.json").samefile(same / "state.json")  # locked for each
    save(kept, 3, 4)
    assert not same.exists()
    assert best_round(kept) == 2


def test_nor_are_those_of_the_best_where_it_was_first(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save_best(kept, 2)
    found = kept.best()
    assert found is not None
    run(kept.save, found.progress, ScriptedPolicy(skill=0.02))
    (same,) = (tmp_path / "checkpoints").glob("round-*")
    assert (found.directory / "skill").samefile(same / "skill")
    assert latest_round(kept) == 2
    other = replace(found.progress, round=3)  # of another policy
    run(kept.save, other, ScriptedPolicy(skill=0.03))
    assert latest_round(kept) == 3


def test_where_files_cannot_be_linked_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> None:
        raise OSError("no such links here")

    kept = checkpoints(tmp_path)
    save(kept, 2)
    (same,) = (tmp_path / "checkpoints").glob("round-*")
    monkeypatch.setattr(Path, "hardlink_to", refused)
    save_best(kept, 2, same)
    assert best_round(kept) == 2


def test_a_kill_while_the_best_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(ScriptedPolicy):
        async def save(self, directory: Path) -> None:
            await super().save(directory)
            raise ChildFailed("gone")

    async def die() -> None:
        await kept.save_best(Progress(round=3), Dying())

    kept = checkpoints(tmp_path)
    save_best(kept, 1)
    with pytest.raises(ChildFailed):
        run(die)
    assert best_round(kept) == 1

    symlink_to = Path.symlink_to
    monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        save_best(kept, 4)  # whole, and not linked yet
    assert best_round(kept) == 1
    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    save_best(kept, 5)
    assert best_round(kept) == 5
    assert names(tmp_path, "best*") == ["best", "best-00000005-0"]  # what was left is gone


@pytest.mark.parametrize("harm", [_no_state, _cut_state, _empty_state, _other_fields])
def test_a_best_that_is_damaged_is_none(tmp_path: Path, harm) -> None:  # type: ignore[no-untyped-def]
    kept = checkpoints(tmp_path)
    save(kept, 1)
    save_best(kept, 2)
    harm(tmp_path / "checkpoints" / "best")
    assert kept.best() is None
    assert latest_round(kept) == 1
    save_best(kept, 3)
    assert best_round(kept) == 3


def test_a_best_that_is_put_aside_is_none(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save_best(kept, 2)
    found = kept.best()
    assert found is not None
    assert kept.put_aside(found).name == "damaged-best-00000002-0"
    assert kept.best() is None
    save_best(kept, 2)
    assert best_round(kept) == 2


def test_a_best_of_another_model_is_none(tmp_path: Path) -> None:
    save_best(checkpoints(tmp_path), 2)
    assert checkpoints(tmp_path, model="another").best() is None


def test_a_node_goes_on_from_the_best_where_it_is_the_newest(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    save_best(kept, 0)
    assert kept.latest() is None  # nothing was trained
    save(kept, 1)
    save_best(kept, 2)
    assert latest_round(kept) == 2
    with kept.held() as held:
        assert held is not None
        save_best(kept, 3)
        assert (held.directory / "skill").read_text() == "0.02"
        assert best_round(kept) == 3
    save(kept, 3)
    found = kept.latest()
    assert found is not None
    assert found.directory.name == "round-00000003"  # of two of one round
    save_best(kept, 4)
    assert names(tmp_path, "best*") == ["best", "best-00000004-0"]


def test_what_was_decided_is_saved(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    decided = Validated(0.3, 0.5, 64, 10, falls=1, rate_share=0.25, returns=2)
    run(kept.save, Progress(round=1, validated=decided), ScriptedPolicy())
    found = kept.latest()
    assert found is not None
    assert found.progress.validated == decided
