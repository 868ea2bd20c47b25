"""`swarm-node join` as people run it: processes over real libp2p that train real models, killed,
interrupted and started wrongly."""

import json
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from node.observe.records import HeldOut, StepDone, WorkDone
from node.observe.status import SOCKET_NAME, socket_path
from swarm.command import EXIT_INTERRUPTED
from swarm.identity import Identity
from tests.integration.nodes import (
    ENVIRON,
    LOOPBACK,
    WAIT_S,
    MakeFed,
    MakeNode,
    NodeProcess,
    all_gone,
    swarm_node,
    until,
)

pytestmark = pytest.mark.integration


def peer_id(node: NodeProcess) -> str:
    return str(node.until(node.status).peer_id)


# --- a swarm ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_two_nodes_join_and_train_on_each_others_groups(make_node: MakeNode) -> None:
    first = make_node("a").start()
    second = make_node("b", "--peer", first.address()).start()
    for node, other in ((first, second), (second, first)):
        node.until(lambda node=node, other=other: peer_id(other) in node.sources())
        node.until(lambda node=node: node.foreign_trained() > 0)
    assert [node.interrupt() for node in (first, second)] == [0, 0], [first.said(), second.said()]


def test_a_node_hears_who_trained_on_its_groups_and_keeps_the_count(make_node: MakeNode) -> None:
    first = make_node("a").start()
    second = make_node("b", "--peer", first.address()).start()
    kept = first.data_dir / "credit.json"
    first.until(lambda: kept.exists() and json.loads(kept.read_text())["groups"] > 0)
    before = json.loads(kept.read_text())
    assert before["peers"] == [peer_id(second)]
    first.kill()
    first.start()
    status = first.until(first.status)
    assert status.credited_groups_ever >= before["groups"]
    assert status.credited_by_ever == 1
    status = first.until(lambda: (s := first.status()) and s.credited_groups and s)
    assert status.credited_by == 1
    (row,) = (each for each in status.peers if each.peer_id == peer_id(second))
    assert row.groups_credited == status.credited_groups
    assert first.interrupt() == 0
    assert "of your groups were trained on by 1 peer" in first.said()


def test_a_learner_and_its_worker_both_say_what_was_trained_on(make_fed: MakeFed) -> None:
    learner, worker = make_fed()
    worker.until(lambda: worker.events(WorkDone))
    learner.until(lambda: learner.events(StepDone))
    mine = worker.until(lambda: (s := worker.status()) and s.credited_groups and s)
    assert mine.credited_by == 1
    trained = learner.until(learner.status).peers
    assert sum(each.groups_trained for each in trained) >= mine.credited_groups


@pytest.mark.long
def test_three_nodes_find_each_other_share_and_survive_a_kill(make_node: MakeNode) -> None:
    first = make_node("a").start()
    address = first.address()
    # only one of them is told of: the others find each other through it
    swarm = [first, *(make_node(name, "--peer", address).start() for name in "bc")]
    ids = [peer_id(node) for node in swarm]
    for node, own in zip(swarm, ids, strict=True):
        node.until(lambda node=node, own=own: node.sources() >= {*ids} - {own})

    victim, witness = swarm[1], swarm[2]
    children = victim.children()
    assert victim.trainer() in children
    before = victim.last_round()
    victim.until(lambda: victim.last_round() > before)
    victim.kill()
    assert all_gone(children), "children of a killed node live on"
    done = victim.last_round()
    lost_marks = len(victim.marked()) - victim.foreign_trained()
    assert 0 <= lost_marks <= 2, "more is lost than the round that was killed"

    victim.start()
    victim.until(lambda: len(victim.starts_told()) == 2)
    resumed = victim.starts_told()[1].round
    assert done - 1 <= resumed <= done, "it does not resume from its last checkpoint"
    accepted = witness.accepted_of(ids[1])
    witness.until(lambda: witness.accepted_of(ids[1]) > accepted)
    for node, own in zip(swarm, ids, strict=True):
        trained = node.foreign_trained()
        node.until(lambda node=node, trained=trained: node.foreign_trained() > trained)
        assert own not in node.sources()

    assert [node.interrupt() for node in swarm] == [0, 0, 0], [node.said() for node in swarm]
    for node in swarm:
        marked = node.marked()
        assert len(marked) == len(set(marked))
        lost = lost_marks if node is victim else 0
        assert len(marked) == node.foreign_trained() + lost, "a group was trained on twice"
        assert not node.troubles(), node.troubles()
    # rounds beyond `done` + 1 cannot have been shared before the kill
    fresh = [r for node in (first, witness) for r in node.rounds_pooled_of(ids[1]) if r > done + 1]
    assert min(fresh) <= resumed + 3, "what it made after the restart was not taken at first"


@pytest.mark.long
def test_an_interrupted_node_leaves_in_order_and_can_be_asked_before_and_after(
    make_node: MakeNode, prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    node = make_node("a").start()
    node.until(lambda: node.last_round() >= 2)
    text = swarm_node("status", "--data-dir", node.data_dir)
    assert text.returncode == 0
    assert peer_id(node)[:6] in text.stdout
    answer = swarm_node("status", "--data-dir", node.data_dir, "--json")
    snapshot = json.loads(answer.stdout)
    assert snapshot["peer_id"] == peer_id(node)
    assert snapshot["round"] >= 2

    children = node.children()
    assert len(children) >= 2  # the trainer and the verifier
    assert node.interrupt() == 0, node.said()
    assert all_gone(children)
    assert not socket_path(node.data_dir).exists()
    assert SOCKET_NAME not in os.listdir(node.data_dir)
    last = node.last_round()
    kept = sorted(p.name for p in (node.data_dir / "checkpoints").glob("round-*"))
    assert kept[-1] == f"round-{last:08d}", "the last finished round is not the last checkpoint"
    assert swarm_node("status", "--data-dir", node.data_dir).returncode == 2

    run_file, cache = prepared
    in_run = ("eval", "--run", run_file)
    rate = swarm_node(
        *(*in_run, "--data-dir", node.data_dir, "--samples", 2, "--against", "before"),
        SWARM_NODE_CACHE_DIR=str(cache),
    )
    assert rate.returncode == 0, rate.stderr
    assert f"after round {last}, " in rate.stdout
    assert rate.stdout.count("pass@2") == 2  # of the node's policy, and of the one before
    assert "unlocked" in rate.stdout
    assert "no checkpoint" not in rate.stdout + rate.stderr
    (tmp_path / "empty").mkdir()
    fresh = swarm_node(
        *(*in_run, "--data-dir", tmp_path / "empty", "--samples", 0),
        SWARM_NODE_CACHE_DIR=str(cache),
    )
    assert fresh.returncode == 0, fresh.stderr
    assert "no checkpoint yet; this is the model as it was before training" in fresh.stdout
    assert "pass@" not in fresh.stdout
    mistyped = swarm_node(*in_run, "--data-dir", tmp_path / "mistyped")
    assert mistyped.returncode == 2
    assert mistyped.stderr.count("\n") == 1
    assert "no such directory" in mistyped.stderr
    assert not (tmp_path / "mistyped").exists()
    report = swarm_node("report", node.data_dir, "--out", tmp_path / "report")
    assert report.returncode == 0, report.stderr
    assert peer_id_in_key(node)[-6:] in (tmp_path / "report" / "report.html").read_text()


def peer_id_in_key(node: NodeProcess) -> str:
    return str(Identity.load(node.data_dir / "identity.pem").peer_id)


def test_runs_of_peers_are_told_and_can_be_joined(make_node: MakeNode, tmp_path: Path) -> None:
    assert "of whom?" in swarm_node("runs").stderr
    node = make_node("one").start()
    address = node.address()
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(node)}"
    done = swarm_node("runs", "--peer", nobody, "--peer", address)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"! {nobody}: ")
    run_id = node.until(node.status).run_id
    assert lines[1].startswith(f"{run_id}: 1 node, ")
    assert lines[-1] == f"  swarm-node join {address}/run/{run_id}"
    assert node.until(node.status).rejected == {}, "who only asks breaks no rule"
    assert swarm_node("runs", "--peer", nobody).returncode == 1
    words = lines[-1].split()[1:]
    assert words[0] == "join"
    config = swarm_node("config", "--run", run_id, "--data-dir", tmp_path / "new")
    assert config.returncode == 2  # its rules are not here yet


def test_who_is_not_on_a_list_and_who_has_the_list_both_say_so(
    make_node: MakeNode, tmp_path: Path
) -> None:
    (tmp_path / "allowed").write_text("# nobody yet\n")
    owner = make_node("owner", "--allow", str(tmp_path / "allowed")).start()
    guest = make_node("guest", "--peer", owner.address()).start()
    guest_id = peer_id(guest)

    def notes(node: NodeProcess) -> str:
        return "".join(node.until(node.status).notes)

    guest.until(lambda: "cannot join through" in notes(guest))
    assert f"(--allow), {guest_id}" in notes(guest)
    owner.until(lambda: f"refused {guest_id}, which is not in that file" in notes(owner))
    newcomer = swarm_node("join", "--peer", owner.address(), "--data-dir", tmp_path / "new")
    refused(newcomer, "which run is it?", "(--allow)")


def test_a_model_that_no_node_has_trained_is_evaluated(
    prepared: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file, cache = prepared
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENVIRON, "PYTHONPATH", str(Path(__file__).parents[2]))
    words = ("eval", "--run", run_file, "--samples", 0)
    done = swarm_node(*words, SWARM_NODE_CACHE_DIR=str(cache))  # in a folder without swarm-data
    assert done.returncode == 0, done.stderr
    assert "the model as it was before training" in done.stdout
    (tmp_path / "config.json").write_text("{}")
    done = swarm_node(*words, "--data-dir", tmp_path, SWARM_NODE_CACHE_DIR=str(cache))
    refused(done, "a model directory and no node's", f"--model {tmp_path}")


def test_a_paused_node_does_nothing_serves_on_and_goes_on(make_node: MakeNode) -> None:
    node = make_node("guest").start()
    node.until(lambda: node.last_round() >= 1)
    assert swarm_node("pause", "--data-dir", node.data_dir).stderr == ""

    def phase() -> str:
        status = node.status()
        return status.phase if status else ""

    node.until(lambda: phase() == "paused (swarm-node resume)")
    stood = node.last_round()
    other = make_node("other", "--peer", node.address()).start()
    other.until(lambda: peer_id(node) in other.sources())  # of what it had made
    assert node.last_round() == stood
    assert swarm_node("resume", "--data-dir", node.data_dir).returncode == 0
    node.until(lambda: node.last_round() > stood)
    swarm_node("pause", "--data-dir", node.data_dir)
    node.until(lambda: phase() == "paused (swarm-node resume)")
    assert node.interrupt() == 0  # it leaves as ever


def test_a_second_interrupt_ends_a_node_at_once(make_node: MakeNode) -> None:
    node = make_node("a").start()
    node.until(lambda: node.last_round() >= 1)
    children = node.children()
    trainer = node.trainer()
    assert trainer is not None
    trainer.suspend()  # so that leaving takes its time
    try:
        node.process.send_signal(signal.SIGINT)
        node.until(lambda: "leaving" in node.said())
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(10) == 130
    finally:
        with suppress(psutil.NoSuchProcess):  # the node ended it
            trainer.resume()
    assert all_gone(children)


def is_in_main(node: NodeProcess) -> bool:
    """Whether our own code runs, and not yet Python's start, whose traces are not ours."""
    maps = psutil.Process(node.process.pid).memory_maps()
    return any("pydantic_core" in mapped.path for mapped in maps)


@pytest.mark.parametrize("wait_s", [0.0, 1.0, 3.0])
def test_a_node_interrupted_while_it_starts_ends_without_a_traceback(
    make_node: MakeNode, wait_s: float
) -> None:
    node = make_node("a").start()
    node.until(lambda: is_in_main(node))
    with suppress(subprocess.TimeoutExpired):
        node.process.wait(wait_s)
    assert node.interrupt() in (0, 130), node.said()
    assert "Traceback" not in node.said()


@pytest.mark.long
def test_a_trainer_that_is_killed_comes_back_from_the_last_checkpoint(make_node: MakeNode) -> None:
    first = make_node("a").start()
    other = make_node("b", "--peer", first.address()).start()
    first.until(lambda: first.foreign_trained() > 0)
    trainer = first.trainer()
    assert trainer is not None
    trainer.kill()
    first.until(first.troubles)
    assert "the trainer failed and is restarted" in first.troubles()[0].what
    snapshot = first.until(lambda: (s := first.status()) and "trainer" in "".join(s.notes) and s)
    assert snapshot.peers, "the network went down with the trainer"
    first.until(lambda: len(first.starts_told()) == 2)
    resumed = first.starts_told()[1].round
    assert first.last_round() - 1 <= resumed <= first.last_round()
    first.until(lambda: first.last_round() > resumed + 1)
    until(lambda: (s := first.status()) and not any("trainer" in note for note in s.notes))
    assert len(first.starts_told()) == 2
    assert other.process.poll() is None


# --- one key, two nodes ------------------------------------------------------------------------


@pytest.mark.long
def test_of_two_nodes_with_one_key_the_newcomer_stops(make_node: MakeNode, tmp_path: Path) -> None:
    key = tmp_path / "shared.pem"
    assert swarm_node("keygen", "--out", key).returncode == 0
    third = make_node("c").start()
    third_address = third.address()
    older = make_node("a", "--peer", third_address, "--key-file", str(key)).start()
    older.until(lambda: older.foreign_trained() > 0)

    through_another = make_node("b", "--peer", third_address, "--key-file", str(key)).start()
    straight = make_node("d", "--peer", older.address(), "--key-file", str(key)).start()
    for newcomer in (through_another, straight):
        assert newcomer.process.wait(WAIT_S) == 2, newcomer.said()
        assert "Traceback" not in newcomer.said()
        told = [line for line in newcomer.said().splitlines() if line.startswith("swarm-node: ")]
        assert len(told) == 1
        assert peer_id_in_key_file(key) in told[0]
    rounds = older.last_round()
    older.until(lambda: older.last_round() > rounds + 1)

    older.kill()
    older.start()
    older.until(lambda: older.last_round() > rounds + 2)
    until(lambda: any(p.peer_id == peer_id(older) for p in third.status().peers))  # type: ignore[union-attr]
    assert older.process.poll() is None


def peer_id_in_key_file(key: Path) -> str:
    return str(Identity.load(key).peer_id)


# --- experiments -------------------------------------------------------------------------------


def test_a_sweep_is_interrupted_goes_on_and_ends_with_a_table(make_node: MakeNode) -> None:
    swept = make_node("sweep", "--seed", "0..1", "--rounds", "3", "--no-lan", "--external", "0")
    swept.start("--validation-tasks", "0", "--busy-share", "0.05")
    first = swept.data_dir / "seed-0" / "events.jsonl"
    swept.until(lambda: first.exists() and b'"event": "round"' in first.read_bytes())
    assert swept.interrupt() == EXIT_INTERRUPTED
    assert "seed 0 stopped after round" in swept.said()
    swept.start("--validation-tasks", "0")
    assert swept.process.wait(WAIT_S) == 0, swept.said()
    *_, head, zero, one, mean, around = swept.said().splitlines()
    assert head.split()[:3] == ["seed", "held-out,", "start"]
    assert [row.split()[0] for row in (zero, one, mean, around)] == ["0", "1", "mean", "95"]
    assert "seed 0 stopped" not in swept.said().partition("seed 1:")[2]


def files(directory: Path) -> dict[str, bytes]:
    found = sorted(each for each in directory.rglob("*") if each.is_file())
    return {str(each.relative_to(directory)): each.read_bytes() for each in found}


def test_a_fork_goes_on_from_a_round_of_another_directory_with_other_settings(
    make_node: MakeNode, prepared: tuple[Path, Path]
) -> None:
    """Run and model are those of the source, which stays as it was."""
    alone = ("--external", "0", "--validation-tasks", "0", "--no-lan", "--threads", "1")
    source = make_node("source", *alone, "--rounds", "4", "--checkpoints-kept", "9").start()
    assert source.process.wait(WAIT_S) == 0, source.said()
    before = files(source.data_dir)

    def fork(name: str, round_number: int, *more: str) -> NodeProcess:
        wanted = ("--fork", f"{source.data_dir}@{round_number}", "--loss", "cispo", *alone, *more)
        made = make_node(name, *wanted, "--checkpoints-kept", "9")
        made.run_file = None
        made.start()
        made.process.wait(WAIT_S)
        return made

    made = fork("made", 2, "--rounds", "3")
    assert made.process.returncode == 0, made.said()
    assert files(source.data_dir) == before
    saved = files(made.data_dir / "checkpoints")
    for name in ("model.safetensors", "optimizer.pt"):
        assert saved[f"round-00000002/{name}"] == before[f"checkpoints/round-00000002/{name}"]
    assert [each.round for each in made.rounds()] == [3]
    assert [each.round for each in made.events(HeldOut)] == [2, 3]
    held = json.loads((made.data_dir / "starts" / "000001.json").read_text())["settings"]
    assert (held["fork"], held["loss"]) == (f"{source.data_dir}@2", "cispo")
    again = fork("made", 2, "--rounds", "4")  # the same command goes on
    assert again.process.returncode == 0, again.said()
    assert [each.round for each in made.rounds()] == [3, 4]
    assert "has checkpoints of its own" in fork("made", 1, "--rounds", "5").said()
    refusal = fork("none", 7, "--rounds", "9").said()
    assert "no checkpoint of that round; the nearest are of 3 and 4 (" in refusal


# --- wrong inputs ------------------------------------------------------------------------------


def refused(finished: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = [line for line in finished.stderr.splitlines() if line.strip()]
    assert finished.returncode == 2, (finished.returncode, finished.stdout, finished.stderr)
    assert len(lines) == 1, finished.stderr
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--group-size", "0"], ["--group-size"]),
        (["--group-size", "many"], ["--group-size"]),
        (["--local", "0", "--external", "0"], ["--local"]),
        (["--peer", "nonsense"], ["--peer", "nonsense"]),
        (["--run", "missing"], ["--run", "missing"]),
        (["--model", "/does/not/exist"], ["/does/not/exist"]),
        (["--model", "nobody/no-such-model"], ["nobody/no-such-model"]),
        (["--key-file", "/does/not/exist.pem"], ["--key-file"]),
        (["--data-dir", "/proc/nowhere"], ["--data-dir"]),
        (["--engine", "steam"], ["--engine"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_a_wrong_input_is_refused_in_one_line(
    flags: list[str], words: list[str], tmp_path: Path, prepared: tuple[Path, Path]
) -> None:
    run_file, cache = prepared
    rules = ["--run", str(run_file), "--data-dir", str(tmp_path / "a"), "--listen", LOOPBACK]
    finished = swarm_node("join", *rules, *flags, SWARM_NODE_CACHE_DIR=str(cache))
    refused(finished, *words)


def test_a_run_whose_tasks_cannot_be_made_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'name = "wrong"\n[[environments]]\nname = "chain_sum"\n'
        "parameters = { min_terms = 5, max_terms = 2 }\n"
    )
    # To make and warm the tiny policy takes tasks too: what is wrong shows first there
    rules = ["join", "--run", run_file, "--data-dir", tmp_path / "a", "--listen", LOOPBACK]
    finished = swarm_node(*rules, SWARM_NODE_CACHE_DIR=str(tmp_path / "cache"))
    refused(finished, "chain_sum", "max_terms must be >= min_terms; correct its parameters")
    assert "this node is" not in finished.stdout


@pytest.mark.long
def test_a_hub_that_does_not_answer_is_given_up(
    tmp_path: Path, prepared: tuple[Path, Path]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    finished = swarm_node(
        *("join", "--run", prepared[0], "--data-dir", tmp_path / "a", "--listen", LOOPBACK),
        *("--model", "nobody/no-such-model"),
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT=f"http://127.0.0.1:{port}",
    )
    refused(finished, "nobody/no-such-model")


def test_what_is_in_use_is_refused(make_node: MakeNode, prepared: tuple[Path, Path]) -> None:
    node = make_node("a").start()
    port = node.address().split("/")[4]
    run_file, cache = prepared
    common = ["join", "--run", run_file]
    again = swarm_node(
        *common, "--data-dir", node.data_dir, "--listen", LOOPBACK, SWARM_NODE_CACHE_DIR=str(cache)
    )
    refused(again, "--data-dir", "another node")
    other = node.data_dir.parent / "other"
    taken = swarm_node(
        *(*common, "--data-dir", other, "--listen", f"/ip4/127.0.0.1/tcp/{port}"),
        SWARM_NODE_CACHE_DIR=str(cache),
    )
    refused(taken, port)


def test_status_without_a_node_is_refused(tmp_path: Path) -> None:
    refused(swarm_node("status", "--data-dir", tmp_path), str(tmp_path))
    refused(swarm_node("status", "--data-dir", tmp_path / "missing"))
    refused(swarm_node("report", tmp_path / "missing"))
    refused(swarm_node("report", tmp_path, "--out", tmp_path / "out"))


@pytest.mark.long
def test_a_private_swarm_takes_in_the_invited_alone(make_node: MakeNode) -> None:
    first = make_node("a", "--private").start()
    address = first.address()
    assert "--peer" not in first.said()
    printed = swarm_node("invite", "--data-dir", first.data_dir)
    invitation = printed.stdout.strip()
    assert "secret" in printed.stderr
    shown = swarm_node("status", "--data-dir", first.data_dir).stdout
    assert "swarm-node invite" in shown
    assert "--peer" not in shown
    stranger = make_node("s", "--peer", address).start()
    invited = make_node("b").start("--invite", invitation)
    invited_id = peer_id(invited)
    first.until(lambda: invited_id in first.sources())
    stranger.until(lambda: (shot := stranger.status()) and shot.notes)
    assert peer_id(stranger) not in {peer.peer_id for peer in first.until(first.status).peers}
    assert not stranger.until(stranger.status).peers
    key = (first.data_dir / "join.key").read_text().strip()
    assert (invited.data_dir / "join.key").read_text().strip() == key
    for node in (first, invited):
        for kept in (node.said(), (node.data_dir / "events.jsonl").read_text()):
            assert key not in kept
            assert invitation not in kept
        assert key not in str(node.until(node.status))
