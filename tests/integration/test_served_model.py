"""A node whose model a server elsewhere serves teaches nodes that train, as people start them."""

from pathlib import Path

import pytest

from node.observe.event_log import read_events
from node.observe.records import RoundDone
from tests.integration.nodes import LOOPBACK, MakeNode, NodeProcess, swarm_node
from tests.openai_server import answer_sums, openai_server

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_served_model_teaches_who_trains_and_waits_while_its_server_is_away(
    tmp_path: Path, prepared: tuple[Path, Path], make_node: MakeNode
) -> None:
    with openai_server() as server:
        flags = ("--engine", "openai", "--engine-url", server.url, "--local", "2")
        command = ("join", "--group-size", "4", "--checkpoint-every", "1")
        teacher = NodeProcess(tmp_path / "teacher", *prepared, flags, command)
        try:
            teacher.start()
            student = make_node("student", "--peer", teacher.address()).start()
            who = teacher.starts_told
            producer = teacher.until(who)[0].peer_id
            student.until(lambda: producer in student.sources())
            assert teacher.rounds()[0].groups_shared == 2
            assert teacher.rounds()[0].generated_tokens == 2 * 4 * 3
            assert teacher.rounds()[-1].external_groups == 0
            assert teacher.trainer() is None
            status = teacher.status()
            assert status is not None
            assert (status.model, status.engine, status.trainer_memory_bytes) == (
                "sums",
                "openai",
                0,
            )
            assert status.tokens_per_s > 0
            accepted = student.status()
            assert accepted is not None
            assert accepted.rejected == {}

            server.answer = lambda handler: handler.reply({"error": "loading"}, 503)
            told = teacher.until(teacher.troubles)
            assert "status 503: loading" in told[-1].what
            assert len(told) == 1
            stuck = teacher.last_round()
            server.answer = answer_sums
            teacher.until(lambda: teacher.last_round() > stuck + 1)
            assert teacher.interrupt() == 0
            first = teacher.last_round()
            teacher.start()  # goes on with its count and with tasks that it has not done
            teacher.until(lambda: teacher.last_round() > first)
            assert len(teacher.starts_told()) == 2
        finally:
            teacher.clean_up()


def test_what_is_wrong_with_a_server_is_one_line(
    tmp_path: Path, prepared: tuple[Path, Path]
) -> None:
    with openai_server() as server:
        server.answer = lambda handler: handler.reply({"error": "no chat template"}, 400)
        done = swarm_node(
            *("join", "--engine", "openai", "--engine-url", server.url, "--listen", LOOPBACK),
            *("--run", prepared[0], "--data-dir", tmp_path / "data"),
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"swarm-node: --engine-url {server.url}: /chat/completions: status 400: no chat template\n"
    )
    assert [
        r for _, r in read_events(tmp_path / "data/events.jsonl") if isinstance(r, RoundDone)
    ] == []
