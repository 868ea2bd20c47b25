"""Classes by TRL's contract: found out if they are not the same everywhere, and trained on by nodes
that share, replay and agree. The packages are in `tests/factories`."""

import os
import re
import sys
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
    sound = settle(tmp_path, "lamp_sound", monkeypatch)
    assert re.fullmatch("[0-9a-f]{64}", sound["sha256"])
    opening = "__import__('socket').create_connection(('127.0.0.1', 9))"
    with pytest.raises(ConfigError, match=r"cannot begin \((PermissionError|OSError)"):
        settle(tmp_path, "lamp_served", monkeypatch, opening=opening)
