"""`node.client`: the examples of docs/python.md as they stand, and equality with the command."""

import asyncio  # noqa: TID251 - a notebook's kernel has this loop
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from node.client import Client, _Told
from node.observe.records import Trouble
from swarm.errors import ChildFailed, ConfigError
from tests.integration.nodes import LOOPBACK, swarm_node, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
STEPS = 3
ALONE = {"seed": 1, "task_seed": 7, "threads": 1, "local_groups": 2, "group_size": 4}


@pytest.fixture
def run(prepared: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of small sums, in a directory where relative data directories go."""
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(prepared[1]))
    monkeypatch.chdir(tmp_path)
    return prepared[0]


def client(run: Path, name: str, **more: Any) -> Client:
    return Client(run, **{"say": lambda _: None, "data_dir": name, **ALONE, **more})


def trained(run: Path, name: str, **more: Any) -> Path:
    """The state after some steps of GRPO."""
    with client(run, name, **more) as made:
        for _ in range(STEPS):
            made.forward_backward(made.sample(made.tasks(2)), loss="grpo")
            made.optim_step()
        return made.save_state()


def weights(state: Path) -> bytes:
    return (state / "model.safetensors").read_bytes()


def moments(state: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Adam's, by parameter."""
    found: dict[int, dict[str, torch.Tensor]] = torch.load(state / "optimizer.pt")["optimizer"][
        "state"
    ]
    return found


def test_the_pages_examples_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    program = (
        "\n".join(blocks)
        .replace('run="sums", ', "")
        .replace('model="smollm2"', f"run={str(run)!r}")
    )
    program = program.replace("range(20)", "range(2)").replace(
        "join=True", f"join=True, listen=[{LOOPBACK!r}]"
    )
    exec(compile(program, str(PAGE), "exec"), {})
    said = [
        line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"-?\d+\.\d+", line)
    ]
    passed, *losses = map(float, said)
    assert 0.0 <= passed <= 1.0
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_the_loop_ends_with_the_weights_of_the_command(
    run: Path, prepared: tuple[Path, Path]
) -> None:
    mine = trained(run, "mine")
    given = {"local": 2, "group-size": 4, "external": 0, "seed": 1, "task-seed": 7, "threads": 1}
    given |= {"share": "none", "loss": "grpo", "evaluate-every": 0, "listen": LOOPBACK}
    given |= {"rounds": STEPS, "data-dir": "theirs", "run": run}
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    done = swarm_node("join", "--no-lan", *flags, SWARM_NODE_CACHE_DIR=str(prepared[1]))
    assert done.returncode == 0, done.stderr
    theirs = Path("theirs/checkpoints") / f"round-{STEPS:08d}"
    assert weights(mine) == weights(theirs)
    torch.testing.assert_close(moments(mine), moments(theirs), rtol=0, atol=0)
    assert weights(trained(run, "other", seed=2)) != weights(mine)


def test_a_state_is_taken_back_whole(run: Path) -> None:
    with client(run, "state") as made:
        groups = made.sample(["1+1=", "2+3="], 4)
        for group in groups:
            group.rewards = [1.0, 0.0, 0.0, 1.0]

        def step() -> Path:
            made.forward_backward(groups, loss="grpo")
            assert made.optim_step().trained_tokens
            return made.save_state()

        begun, after = step(), step()
        assert weights(step()) != weights(after) != weights(begun)
        made.load_state(begun)
        last = step()
        assert weights(last) == weights(after)
        torch.testing.assert_close(moments(last), moments(after), rtol=0, atol=0)
    with client(run, "state") as again:  # from where the last one was left
        assert again.save_state() == last


def test_gradients_add_up_until_the_step_and_an_error_drops_none(run: Path) -> None:
    with client(run, "sums", step_guard=False) as made:
        right, wrong = made.sample(["1+1=", "2+2="], 2)
        right.rewards, wrong.rewards = [1.0, 0.0], [0.0, 1.0]
        first = made.forward_backward([right])
        second = made.forward_backward([wrong])
        right.rewards = [1.0]
        with pytest.raises(ConfigError, match="1 rewards for 2 completions"):
            made.forward_backward([right])
        figures = made.optim_step()
        assert figures.trained_tokens
        assert figures.loss == pytest.approx(first + second)
        assert made.optim_step().trained_tokens == 0  # nothing is left of it


def test_prompts_of_its_own_and_what_is_refused(run: Path) -> None:
    with client(run, "own") as made:
        asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
        (chat,) = made.sample(asked, 3, max_tokens=2)
        assert (chat.prompt, len(chat.texts), chat.rewards) == ("1+1=", 3, [0.0] * 3)
        assert all(len(each.token_ids) == len(each.logprobs) <= 2 for each in chat.completions)
        assert [each.prompt for each in made.sample(["a", "b"], 1)] == ["a", "b"]
        with pytest.raises(ConfigError, match="two calls"):
            made.sample([*made.tasks(1), "a"])
        with pytest.raises(ConfigError, match="join=True"):
            made.share([chat])
        with pytest.raises(ConfigError, match="holds no state"):
            made.load_state("nowhere")
        with pytest.raises(ConfigError, match=r"nonsense.*cross_entropy"):
            made.forward_backward([chat], loss="nonsense")
        with pytest.raises(ConfigError, match="by loss='cross_entropy' alone"):
            made.forward_backward([made.example("1+1=", "2")])
        chat.rewards = [0.0, float("nan"), 1.0]
        with pytest.raises(ConfigError, match="rewards: nan is no finite number"):
            made.forward_backward([chat])
        for misused in (
            lambda: made.tasks(-1),
            lambda: made.example("1+1="),
            lambda: made.optim_step(-1),
        ):
            with pytest.raises(ConfigError):
                misused()
        assert made.optim_step().trained_tokens == 0  # without a gradient
        with pytest.raises(ConfigError, match="another node is running"):
            client(run, "own")
    with pytest.raises(ConfigError, match="overlong"):
        client(run, "method", filter="overlong")
    assert not Path("method").exists()


def test_a_failure_between_two_calls_is_said_and_the_next_call_tells_it(run: Path) -> None:
    said: list[str] = []

    def fail() -> None:
        raise OSError("a disk")

    with client(run, "failing", say=said.append) as made:
        assert made._token is not None
        made._token.run_sync_soon(fail)
        made._thread.join()
        assert any(each.startswith("! this client has ended: ") for each in said)
        with pytest.raises(ChildFailed, match="this client has ended: "):
            made.evaluate()


def test_troubles_of_the_engine_reach_the_program() -> None:
    said: list[str] = []
    trio.run(_Told(said.append).tell, Trouble("the engine restarts"))
    assert said == ["the engine restarts"]


def test_two_clients_share_and_draw(run: Path) -> None:
    both = {"join": True, "listen": [LOOPBACK], "lan": False, "task_seed": None}
    said: list[str] = []
    with client(run, "a", **both, say=said.append) as first:
        address = next(line.split()[-1] for line in said if "--peer" in line)
        with client(run, "b", **both, peers=[address]) as second:
            own = first.sample(first.tasks(2))
            with pytest.raises(ConfigError, match="prompts of your own"):
                first.share(first.sample("1+1=", 1))
            assert first.share(own) == 2
            drawn = until(lambda: second.draw(2))
            assert {each.maker for each in drawn} == {own[0].maker}
            assert drawn[0].rewards in [each.rewards for each in own]
            second.forward_backward(drawn)
            assert second.optim_step().policy_version in (0, 1)


def test_it_needs_no_loop_and_stands_in_one(run: Path) -> None:
    async def cell() -> list[str]:
        with client(run, "notebook") as made:
            return made.sample("1+1=", 2)[0].texts

    assert len(asyncio.run(cell())) == 2  # as in a notebook's kernel
