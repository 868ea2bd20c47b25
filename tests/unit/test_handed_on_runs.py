"""Rules of a run that come from a peer: which are believed, and what is asked first."""

import json
from pathlib import Path
from typing import Any

import pytest

from node.config import RunConfig, load_config, run_argument
from node.config.load import handed_on_path, load_run, unknown_run
from node.hosting import run_data
from node.hosting.run_data import _checked, fetch_unknown_run
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.peers.invite import Invitation

ENVIRONMENTS = [{"name": "scripted_sum", "parameters": {"max": 7}}]
LEARNER = Identity.generate().peer_id


def run_of(**more: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "far", "environments": ENVIRONMENTS, **more})


RUNS = [
    run_of(),
    run_of(sampling={"max_new_tokens": 9, "temperature": 0.7}, held_out={"greedy": True}),
    run_of(answer={"format": "last_number", "examples": [{"question": "1", "completion": "2"}]}),
    run_of(learner={"peer": LEARNER, "model": "smollm2"}, publishers=[LEARNER]),
]


def never(question: str) -> bool:
    raise AssertionError(question)


@pytest.mark.parametrize("run", RUNS)
def test_rules_come_back_as_they_were(run: RunConfig) -> None:
    assert _checked(run.as_json(), run.run_id, never) == run


def test_packaged_runs_come_back_as_they_were() -> None:
    for name in ("demo", "sums", "sapo9"):
        run = load_run(Path(name), {})[0]
        assert _checked(run.as_json(), run.run_id, never).run_id == run.run_id
        assert run_argument(run) == ("" if name == "demo" else name)
    assert run_argument(run_of(name="sums")) == run_of(name="sums").run_id


def test_rules_of_another_id_are_refused() -> None:
    run, other = RUNS[:2]
    with pytest.raises(ConfigError, match=f"sent the rules of {other.run_id}"):
        _checked(other.as_json(), run.run_id, never)


@pytest.mark.parametrize(
    "sent",
    [
        b"[]",
        b"{}",
        b"\xff",
        b'{"environments": [1]}',
        b'{"environments": [{"name": "scripted_sum"}], "learner": 3}',
        b"[" * 100_000,
        b'{"name": "far", "environments": [{"name": "scripted_sum"}], "data_dir": "/"}',
        b'{"name": "far", "environments": [{"name": "scripted_sum"}], "node": {"model": "x"}}',
        b'{"name": "far", "environments": [{"name": "no_such_environment"}]}',
        b'{"name": "far", "environments": [{"name": "\\u001b[2J\\nsum"}]}',
        b'{"name": "\\u001b[2J\\n", "environments": [{"name": "scripted_sum"}]}',
        b'{"name": "far", "\\u001b[2J": 1, "environments": [{"name": "scripted_sum"}]}',
        b'{"name": "' + b"n" * 1_000_000 + b'", "environments": [{"name": "scripted_sum"}]}',
    ],
)
def test_what_are_no_rules_is_one_line(sent: bytes) -> None:
    with pytest.raises(ConfigError) as refused:
        _checked(sent, "far-00000000000000000000000000000000", never)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("agrees", [True, False])
def test_a_model_of_the_hub_is_asked_about(agrees: bool) -> None:
    run = run_of(learner={"peer": LEARNER, "model": "somebody/some-model"})
    asked: list[str] = []

    def agreed(question: str) -> bool:
        asked.append(question)
        return agrees

    if agrees:
        assert _checked(run.as_json(), run.run_id, agreed) == run
    else:
        with pytest.raises(ConfigError, match="--yes agrees"):
            _checked(run.as_json(), run.run_id, agreed)
    assert "somebody/some-model" in asked[0]


def test_a_plug_in_is_not_imported_before_the_user_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "far-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[swarm_node.environments]\nfar_away = far_away:Environment\n"
    )
    (tmp_path / "far_away.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sent = json.dumps({"name": "far", "environments": [{"name": "far_away"}]}).encode()
    with pytest.raises(ConfigError, match=r"plug-in 'far_away'.*--yes agrees"):
        _checked(sent, "far-00000000000000000000000000000000", lambda question: False)
    assert not (tmp_path / "imported").exists()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        _checked(sent, "far-00000000000000000000000000000000", lambda question: True)
    assert (tmp_path / "imported").exists()  # it would have been


def test_the_id_is_looked_for_among_what_is_here(tmp_path: Path) -> None:
    run = run_of()
    flags, wanted = {"data_dir": tmp_path}, Path(run.run_id)
    assert unknown_run(flags, {}, wanted) == run.run_id
    invite = Invitation(run.run_id, ()).encode()
    assert unknown_run(flags | {"invite": invite}, {}, None) == run.run_id
    assert unknown_run(flags, {"SWARM_NODE_INVITE": invite}, None) == run.run_id
    with pytest.raises(ConfigError, match="rules of this run are not here"):
        load_config(flags, {}, wanted)
    path = handed_on_path(tmp_path, run.run_id)
    path.parent.mkdir()
    path.write_bytes(run.as_json())
    assert unknown_run(flags | {"invite": invite}, {}, None) is None
    assert load_config(flags, {}, wanted).run == run
    assert load_config(flags, {"SWARM_NODE_RUN": run.run_id}).run == run
    for known in (None, Path("demo"), Path("a/file.toml"), Path(load_run(None, {})[0].run_id)):
        assert unknown_run(flags, {}, known) is None


def test_nobody_is_asked_where_the_run_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "_ask", lambda *given: never("asked"))
    fetch_unknown_run({}, {}, Path("demo"), never)  # type: ignore[arg-type]


def test_without_a_peer_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a node of it with --peer"):
        fetch_unknown_run(
            {"data_dir": tmp_path}, {}, Path("far-00000000000000000000000000000000"), print
        )
    assert not list(tmp_path.iterdir())
