"""Questions of one's own: a newcomer fetches them from a member, trains on them, scores others'."""

import json
from pathlib import Path

import pytest

from tests.integration.nodes import LOOPBACK, MakeNode, NodeProcess, swarm_node
from tests.integration.test_join import peer_id, refused

ITEMS = 100  # which the policy at hand can do in part
RUN = """
name = "mine"
sampling = {max_new_tokens = 4}
held_out = {tasks = 20}
answer = {format = "last_number"}
[[environments]]
name = "dataset"
parameters = {path = "items.jsonl", scorer = "numeric"}
"""


@pytest.mark.long
def test_a_newcomer_fetches_the_items_and_no_liar_s(
    make_node: MakeNode, prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file = tmp_path / "mine.toml"
    run_file.write_text(RUN)
    sums = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10)]
    (tmp_path / "items.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in sums))
    model = next(each for each in (prepared[1] / "policies").iterdir() if each.is_dir())

    def node(name: str, run: str, *flags: str) -> NodeProcess:
        made = make_node(name, "--model", str(model), *flags)
        made.run_file, made.cache_dir = Path(run), tmp_path / f"cache-{name}"
        return made

    alone = node("alone", str(run_file)).start()
    assert alone.process.wait(60) == 2
    assert f"{ITEMS} items, " in alone.said()
    assert "of your own would go to strangers" in alone.said()
    assert "--private" in alone.said()

    first = node("a", str(run_file), "--yes").start()
    address = first.address()
    run_id = first.until(first.status).run_id
    common = ["join", "--run", run_id, "--peer", address, "--listen", LOOPBACK]
    refused(
        swarm_node(*common, "--data-dir", tmp_path / "c", SWARM_NODE_CACHE_DIR=str(tmp_path / "c")),
        f"{ITEMS} items", "strangers", "--yes agrees to fetch them",
    )  # fmt: skip

    second = node("b", run_id, "--peer", address, "--yes").start()
    ids = [peer_id(first), peer_id(second)]
    assert f"{ids[0]} handed on the items of this run" in second.said()
    kept = [sorted((tmp_path / f"cache-{name}" / "data").glob("*.jsonl")) for name in "ab"]
    assert [path.name for path in kept[0]] == [path.name for path in kept[1]] != []
    first.until(lambda: ids[1] in first.sources())  # what each scored again, and trained on
    second.until(lambda: ids[0] in second.sources())
    assert any(record.own_reward > 0 for record in first.rounds())

    (held,) = kept[0]
    held.write_bytes(held.read_bytes().replace(b"9+9=", b"9+8=", 1))  # `a` lies now
    other = ["join", "--run", run_id, "--listen", LOOPBACK, "--yes", "--data-dir", tmp_path / "d"]
    cache = {"SWARM_NODE_CACHE_DIR": str(tmp_path / "d")}
    refused(
        swarm_node(*other, "--peer", address, **cache),
        "nobody handed the items", "wrong_hash",
    )  # fmt: skip
    assert not list((tmp_path / "d" / "data").glob("*.jsonl"))
    third = node("d", run_id, "--peer", address, "--peer", second.address(), "--yes").start()
    third.until(lambda: f"{ids[1]} handed on the items" in third.said())
    assert "wrong_hash" in third.said()
