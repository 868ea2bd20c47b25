"""What `swarm-node config` prints: every setting, and where it came from."""

from pathlib import Path

from node.cli import main
from node.config.explain import explained
from node.config.load import load_with_sources
from node.config.node import NodeConfig
from swarm.command import EXIT_OK

RUN_TEXT = """
name = "x"
[sampling]
max_new_tokens = 9
[[environments]]
name = "scripted_sum"
[node]
local_groups = 3
"""


def lines(flags: dict[str, str], environ: dict[str, str], directory: Path) -> list[str]:
    path = directory / "mine.toml"
    path.write_text(RUN_TEXT)
    return explained(*load_with_sources(flags, environ, path))


def test_each_setting_names_its_source(tmp_path):
    found = lines({"seed": "5"}, {"SWARM_NODE_THREADS": "2"}, tmp_path)
    for line in (
        "seed = 5  (flag)",
        "threads = 2  (environment)",
        "local_groups = 3  (mine.toml)",
        "group_size = 8  (default)",
        "learning_rate = none  (suited to the model, which is looked at when it is loaded)",
        "run.sampling.max_new_tokens = 9  (mine.toml)",
        "run.sampling.top_p = 1.0  (default)",
        "run.environments[0].name = scripted_sum  (mine.toml)",
    ):
        assert line in found
    names = {line.split(" = ")[0] for line in found}
    assert names > set(NodeConfig.model_fields) - {"run"}
    assert "learning_rate = 0.001  (flag)" in lines({"learning_rate": "1e-3"}, {}, tmp_path)


def test_no_password_is_shown(tmp_path):
    environ = {"SWARM_NODE_TELEMETRY": "mqtt://me@broker:1883"}
    found = "\n".join(lines({}, environ, tmp_path))
    assert "telemetry = mqtt://" in found
    assert "broker:1883  (environment)" in found
    assert "invite = none" in found


def test_the_command_prints_them(tmp_path, capsys):
    assert main(["config", "--run", "demo", "--lora-rank", "4"]) == EXIT_OK
    out = capsys.readouterr().out
    assert "lora_rank = 4  (flag)" in out
    assert "run.id = demo-" in out


def test_parameters_that_make_no_task_are_refused(tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'name = "x"\n[[environments]]\nname = "chain_sum"\nparameters = { maxx = 2 }\n'
    )
    assert main(["config", "--run", str(run_file)]) == 2
    told = capsys.readouterr()
    assert "maxx: no such parameter" in told.err
    assert told.out == ""


def test_a_setting_of_several_lines_takes_one(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\n[[environments]]\nname = "scripted_sum"\n'
        '[answer]\nsystem = "One number.\\nNo word."\n'
    )
    found = explained(*load_with_sources({}, {}, path))
    assert r'run.answer.system = "One number.\nNo word."  (mine.toml)' in found
