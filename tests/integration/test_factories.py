"""Classes by TRL's contract: found out if they are not the same everywhere, and trained on by nodes
that share, replay and agree. The packages are in `tests/factories`."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from node.envs.factory import EnvironmentFactory
from swarm.errors import ConfigError
from swarm.rollouts import Author
from swarm.wire.codec import decode_group
from tests.integration.nodes import MakeNode, NodeProcess, swarm_node

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FACTORIES = ROOT / "tests" / "factories"
PAGE = (ROOT / "docs" / "environments.md").read_text()
LAMP = '''
import datetime, random, time

class Lamp:
    games = 0

    def reset(self, **kwargs):
        Lamp.games += 1
        self.reward = {reward}
        return {opening}

    def on(self, n: int) -> str:
        """Light a lamp.

        Args:
            n: its number
        """
        return {reply}
'''
SOUND = {"opening": "random.choice(['a', 'b'])", "reply": "str(random.random())", "reward": "0.5"}
PLANTED = {
    "a set": ({"opening": "' '.join({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"}, "prompts"),
    "seconds": ({"reply": "str(int(time.time()))"}, "replies of the tool on"),
    "the date": ({"reply": "str(datetime.date.today())"}, "replies of the tool on"),
    "an hour": ({"opening": "f'{datetime.datetime.now():%H}'"}, "prompts"),
    "chance": ({"reward": "random.Random().random()"}, "rewards"),
    "an address": ({"reply": "hex(id(self))"}, "replies of the tool on"),
    "earlier games": ({"reply": "str(Lamp.games)"}, "replies of the tool on"),
}


def settle(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **changes: str) -> Any:
    (folder / f"{name}.py").write_text(LAMP.format(**{**SOUND, **changes}))
    monkeypatch.syspath_prepend(str(folder))
    return EnvironmentFactory().settled({"factory": f"{name}:Lamp"}, folder)


@pytest.mark.parametrize("planted", PLANTED)
def test_what_differs_from_process_to_process_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    changes, what = PLANTED[planted]
    name = f"lamp_of_{planted.replace(' ', '_')}"
    with pytest.raises(ConfigError, match=f"two processes make unlike {what} of it"):
        settle(tmp_path, name, monkeypatch, **changes)


def test_a_server_is_out_of_reach_and_global_chance_is_seeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_FILE_OF_MINE", "/nowhere")  # libraries read what such variables name
    reward = "0.5 if 'A_FILE_OF_MINE' not in __import__('os').environ else 1 / 0"
    sound = settle(tmp_path, "lamp_sound", monkeypatch, reward=reward)
    assert re.fullmatch("[0-9a-f]{64}", sound["sha256"])
    opening = "__import__('socket').create_connection(('127.0.0.1', 9))"
    with pytest.raises(ConfigError, match=r"cannot begin \((PermissionError|OSError)"):
        settle(tmp_path, "lamp_served", monkeypatch, opening=opening)


def test_the_pages_example_is_shown_and_fit_as_it_says(tmp_path: Path) -> None:
    section = PAGE.partition("## Environments written for TRL\n")[2].partition("\n## ")[0]
    (module,), (_, toml), (commands,) = (
        re.findall(f"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("python", "toml", "sh")
    )
    (tmp_path / "lights.py").write_text(module)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    show, check = (shlex.split(line)[1:] for line in commands.splitlines())
    shown = swarm_node(*show, PYTHONPATH=path)
    assert "Light exactly the lamps" in shown.stdout, shown.stderr
    assert '"name": "switch"' in shown.stdout
    checked = swarm_node(*check, PYTHONPATH=path)
    assert checked.stdout.endswith("fit for strangers\n"), checked.stdout + checked.stderr
    (tmp_path / "lights.toml").write_text(toml)
    told = swarm_node("config", "--run", tmp_path / "lights.toml", PYTHONPATH=path)
    assert re.search(r'"factory":"lights:Lights","sha256":"[0-9a-f]{64}"', told.stdout), told.stderr


RUN = """
name = "lamps"
sampling = {max_new_tokens = 96}
held_out = {tasks = 1}
[[environments]]
name = "environment_factory"
parameters = {factory = "lamp_switch:Lamps", rows = "ROWS", solution = "turns", turns = 2}
"""


@pytest.mark.long
def test_two_nodes_with_the_tiny_policy_train_on_each_others_calls(
    make_node: MakeNode, tmp_path: Path
) -> None:
    run_file, cache = tmp_path / "lamps.toml", tmp_path / "cache"
    run_file.write_text(RUN)
    environ = {"PYTHONPATH": os.pathsep.join([str(FACTORIES), str(ROOT)])}
    done = swarm_node("prepare", "--run", run_file, SWARM_NODE_CACHE_DIR=str(cache), **environ)
    assert done.returncode == 0, done.stderr

    def node(name: str, *flags: str) -> NodeProcess:
        made = make_node(name, *flags)
        made.run_file, made.cache_dir, made.environ = run_file, cache, environ
        return made

    first = node("a").start()
    nodes = [first, node("b", "--peer", first.address()).start()]
    for each in nodes:
        each.until(lambda each=each: each.foreign_trained() >= 4, wait_s=600.0)
    for each in nodes:
        assert not each.troubles()
        assert any(record.own_reward > 0 for record in each.rounds())
        assert each.rounds()[-1].rejected_total == {}
        assert each.interrupt() == 0
    records = first._pool("SELECT record FROM groups JOIN records USING (seq) WHERE NOT own")
    made = [each for record in records for each in decode_group(record)[1].completions]
    said = [text for each in made for author, text in each.parts() if author is Author.ENVIRONMENT]
    assert "<tool_response>\nlit\n</tool_response>" in said
