"""Settings: where they come from, what they may be, and how a wrong one is told."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from node.config import NodeConfig, RunConfig, load_config, packaged_runs
from node.config.described import settings_of
from node.hosting.models import trainer_spec, vllm_context_tokens
from node.interfaces.engine import Sampling
from node.verify.assignment import assigned_task
from swarm.errors import ConfigError
from swarm.peers.invite import Invitation, JoinKey
from swarm.wire.messages import RUN_ID_CHARS_MAX
from tests.unit.tasks_support import ALICE, BOB, NINE, make_run

RUN_TEXT = 'name = "x"\n[[environments]]\nname = "scripted_sum"\n'
PEER = f"/ip4/1.2.3.4/tcp/4001/p2p/{ALICE}"


def run_file(tmp_path: Path, *, before: str = "", after: str = "") -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(before + RUN_TEXT + after)
    return path


# --- sources ---------------------------------------------------------------------------------


def test_without_anything_given_the_demo_runs() -> None:
    config = load_config({}, {})
    assert config.run.name == "demo"
    # the demo's own [node] table, and a default that it leaves alone
    assert (config.local_groups, config.external_groups, config.group_size) == (8, 4, 8)
    assert config.key_path == config.data_dir / "identity.pem"


def test_flags_come_before_environment_variables_before_the_file_before_defaults(
    tmp_path: Path,
) -> None:
    path = run_file(tmp_path, after="[node]\nlocal_groups = 5\nexternal_groups = 5\nseed = 5\n")
    environ = {"SWARM_NODE_EXTERNAL_GROUPS": "6", "SWARM_NODE_SEED": "6", "HOME": "/"}
    config = load_config({"seed": "7", "threads": None}, environ, path)
    assert config.local_groups == 5
    assert config.external_groups == 6
    assert config.seed == 7
    assert config.threads == 0


def test_the_run_file_may_be_named_by_a_variable_or_by_a_packaged_name(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    assert load_config({}, {"SWARM_NODE_RUN": str(path)}).run.name == "x"
    assert load_config({}, {"SWARM_NODE_RUN": str(path)}, Path("sapo9")).run.name == "sapo9"


def test_lists_are_given_as_lists_or_with_commas(tmp_path: Path) -> None:
    second = PEER.replace("1.2.3.4", "5.6.7.8")
    for peers in ((PEER, second), [PEER, second], f"{PEER}, {second}"):
        assert load_config({"peers": peers}, {}).peers == (PEER, second)
    assert load_config({}, {"SWARM_NODE_PEERS": f"{PEER},{second}"}).peers == (PEER, second)


def test_the_passphrase_is_no_setting() -> None:
    environ = {
        "SWARM_NODE_PASSPHRASE": "secret",
        "SWARM_NODE_PASSPHRASE_ENV": "SWARM_NODE_OTHER",
        "SWARM_NODE_OTHER": "secret",
    }
    assert "secret" not in repr(load_config({}, environ))


def test_settings_are_frozen() -> None:
    config = load_config({}, {})
    with pytest.raises(ValidationError):
        config.seed = 3


# --- runs ------------------------------------------------------------------------------------


def test_all_packaged_runs_load() -> None:
    assert {"demo", "sapo9"} <= set(packaged_runs())
    for name in packaged_runs():
        assert load_config({}, {}, Path(name)).run.name == name
    nine = load_config({}, {}, Path("sapo9")).run
    assert sorted(spec.name for spec in nine.environments) == sorted(NINE)


def test_the_run_id_follows_from_all_rules() -> None:
    base = make_run()
    others = [
        make_run({"name": "scripted_sum", "weight": 2.0}),
        make_run({"name": "scripted_sum", "parameters": {"max": 3}}),
        make_run(limits={"clock_skew_s": 1}),
        make_run(sampling={"top_p": 0.5}),
        make_run(reward="partial"),
        make_run(models=("tiny",)),
        make_run(publishers=(ALICE,)),
        make_run(publishers=(ALICE, BOB)),
    ]
    assert make_run().run_id == base.run_id
    assert len({run.run_id for run in (base, *others)}) == 9
    assert re.fullmatch("test-[0-9a-f]{32}", base.run_id)
    long = RunConfig.model_validate({"name": "x" * 40, "environments": [{"name": "bf"}]})
    assert len(long.run_id) <= RUN_ID_CHARS_MAX


def test_what_has_its_default_is_the_same_run_whether_it_is_said_or_not() -> None:
    plain = make_run()
    for said in ({"publishers": ()}, {"training": {}}, {"training": {"loss": "sapo"}}):
        assert make_run(**said).run_id == plain.run_id
    assert make_run(training={"loss": "m2po"}).run_id != plain.run_id
    clipped = make_run(training={"loss": "sapo, clip_low=0.1"})
    assert clipped.run_id != plain.run_id
    assert make_run(training={"loss": "sapo, clip_low=0.10"}).run_id == clipped.run_id


def test_the_run_file_names_the_loss(tmp_path: Path) -> None:
    path = run_file(tmp_path, after='[training]\nloss = "m2po, second_moment_max=0.1"\n')
    config = load_config({}, {}, path)
    assert RunConfig.model_validate_json(config.run.as_json()).run_id == config.run.run_id
    spec = trainer_spec(config, "model")
    assert spec.loss == "m2po, second_moment_max=0.1"
    assert trainer_spec(load_config({}, {}), "model").loss == "sapo"
    assert trainer_spec(load_config({}, {}), "model", is_learner=True).loss == "dapo"


def test_the_context_is_a_setting_and_vllm_has_no_more_room_than_it_needs(tmp_path: Path) -> None:
    path = run_file(tmp_path, after="[sampling]\nmax_new_tokens = 100\n")
    unset = load_config({}, {}, path)
    assert trainer_spec(unset, "model").context_tokens_max is None
    assert vllm_context_tokens(unset) == 4096 + 100
    wide = load_config({"context_tokens_max": "20000"}, {}, path)
    assert trainer_spec(wide, "model").context_tokens_max == 20_000
    assert vllm_context_tokens(wide) == 20_000
    with pytest.raises(ConfigError, match="context"):
        load_config({"context_tokens_max": "7"}, {}, path)


def test_publishers_are_a_set() -> None:
    run = make_run(publishers=(BOB, ALICE, BOB))
    assert run.publishers == tuple(sorted((ALICE, BOB)))
    assert run.run_id == make_run(publishers=(ALICE, BOB)).run_id
    assert RunConfig.model_validate(run.model_dump()).run_id == run.run_id


def test_the_order_of_parameters_is_no_difference() -> None:
    one = make_run({"name": "scripted_sum", "parameters": {"a": 1, "b": [1.5, "x"]}})
    two = make_run({"name": "scripted_sum", "parameters": {"b": [1.5, "x"], "a": 1}})
    assert one.run_id == two.run_id
    assert one.environments[0].parameters == '{"a":1,"b":[1.5,"x"]}'


def test_a_run_is_the_same_after_a_round_trip_through_its_dump() -> None:
    run = make_run({"name": "scripted_sum", "parameters": {"max": 3}})
    assert RunConfig.model_validate(run.model_dump()).run_id == run.run_id


def test_sampling_reaches_the_engine() -> None:
    run = make_run(sampling={"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7})
    assert run.engine_sampling == Sampling(0.5, 0.9, 7)


# --- what is told ----------------------------------------------------------------------------


def told(
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    path: Path | None = None,
) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(flags or {}, environ or {}, path)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"group_size": "0"}, "--group-size 0: must be at least 2; try --group-size 8"),
        ({"group_size": "a"}, "--group-size a: must be a whole number; try --group-size 8"),
        ({"group_size": 65}, "--group-size 65: must be at most 64; try --group-size 8"),
        ({"grup_size": 3}, "--grup-size: no such setting; did you mean --group-size?"),
        ({"rounds": "0"}, "--rounds 0: must be at least 1; try --rounds 1"),
        ({"engine": "x"}, "--engine x: must be 'torch', 'vllm', 'openai' or 'scripted'; "
         "try --engine torch"),
        ({"engine_update": "wait"}, "--engine-update wait: must be 'keep', 'drain' or 'abort'; "
         "try --engine-update keep"),
        ({"learning_rate": "nan"}, "--learning-rate nan: must be a finite number"),
        ({"learning_rate": "0"}, "--learning-rate 0: must be above 0.0"),
        ({"warm_up_updates": "-1"}, "--warm-up-updates -1: must be at least 0; "
         "try --warm-up-updates 0"),
        ({"stop_after_s": "soon"}, "--stop-after soon: must be a number of seconds"),
        ({"learning_rate": "soon"}, "--learning-rate soon: must be a number"),
        ({"serve_bytes_per_s_max": "soon"}, "--serve-bytes-per-s-max soon: must be a whole "
         "number; try --serve-bytes-per-s-max 8388608"),
        ({"private": "maybe"}, "--private maybe: must be true or false; "
         "try --private false"),
        ({"local_groups": 0, "external_groups": 0},
         "--local 0: no groups to train on; try --local 4"),
        ({"device": "gpu"}, "--device gpu: must be auto, cpu, cuda, or one GPU such as cuda:1; "
         "try --device auto"),
        ({"device": "cuda:1", "engine": "vllm"}, "--device cuda:1: vLLM takes the GPUs that "
         "CUDA_VISIBLE_DEVICES names: set that variable; try --device auto"),
        ({"task_seed": 3},
         "--share all: others refuse groups of a task_seed, as they know a node's tasks by its "
         "key; try --share none"),
        ({"peers": ("/ip4/1.2.3.4/tcp/1",)},
         "--peer /ip4/1.2.3.4/tcp/1: must look like /ip4/<address>/tcp/<port>/p2p/<peer id>"),
        ({"peers": "/ip4/1.2.3.4/udp/1/quic-v1"}, "--peer /ip4/1.2.3.4/udp/1/quic-v1: "
         "is QUIC, and nodes speak TCP alone: it must look like "
         "/ip4/<address>/tcp/<port>/p2p/<peer id>"),
        ({"peers": ("/ip4/1.2.3.4/tcp/1/p2p/12D3",)},
         "--peer /ip4/1.2.3.4/tcp/1/p2p/12D3: 12D3: not an Ed25519 peer id; copy it whole"),
        ({"peers": ("/ip4/1.2.3.400/tcp/1/p2p/12D3",)},
         "--peer /ip4/1.2.3.400/tcp/1/p2p/12D3: 1.2.3.400 is no ip4 address"),
        ({"announce": "/dns4/a..b/tcp/1"}, "--announce /dns4/a..b/tcp/1: a..b is no DNS name"),
        ({"announce": "/dns4/caf\N{LATIN SMALL LETTER E WITH ACUTE}/tcp/1"},
         "--announce /dns4/caf\N{LATIN SMALL LETTER E WITH ACUTE}/tcp/1: "
         "must look like /ip4/<address>/tcp/<port>"),
        ({"listen": "/dns4/host/tcp/1"}, "--listen /dns4/host/tcp/1: must look like "
         "/ip4/0.0.0.0/tcp/0 or /ip6/::/tcp/0; try --listen /ip4/0.0.0.0/tcp/0"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line_with_the_fix(flags: dict[str, Any], line: str) -> None:
    assert told(flags) == line


def test_seconds_that_no_timer_takes_are_refused() -> None:
    assert told({"verify_cpu_s": 1e308}).startswith("--verify-cpu-s 1e+308: must be at most")


def test_the_largest_and_smallest_weights_are_drawn_by() -> None:
    specs = [{"name": n, "weight": w} for n, w in (("scripted_sum", 1e9), ("bf", 1e-9)) * 64]
    run = RunConfig.model_validate({"name": "test", "environments": specs})
    drawn = {assigned_task(run, ALICE, index).environment for index in range(50)}
    assert drawn == {"scripted_sum"}


def test_a_wrong_variable_is_named_as_it_was_written() -> None:
    assert told(environ={"SWARM_NODE_GROUP_SIZE": "99"}) == (
        "SWARM_NODE_GROUP_SIZE=99: must be at most 64; try SWARM_NODE_GROUP_SIZE=8"
    )
    assert told(environ={"SWARM_NODE_GRUP_SIZE": "9"}) == (
        "SWARM_NODE_GRUP_SIZE: no such setting; did you mean SWARM_NODE_GROUP_SIZE?"
    )


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ("[limits]\ngrup_size_max = 3\n",
         "limits.grup_size_max in mine.toml: no such setting; did you mean group_size_max?"),
        ("[limits]\nclock_skew_s = -1\n", "limits.clock_skew_s = -1 in mine.toml: "
         "must be at least 0; try limits.clock_skew_s = 120"),
        ("[limits]\ngroup_size_max = 3\n", "--group-size 8: run x allows at most 3; "
         "try --group-size 3"),
        ("[node]\ngroup_size = 1\n",
         "node.group_size = 1 in mine.toml: must be at least 2; try node.group_size = 8"),
        ("[node]\nlimit = 1\n",
         "node.limit in mine.toml: no such setting; known: activation_checkpointing, advantage"),
        ("weihgt = 2\n", "environments.0.weihgt in mine.toml: no such setting; "
         "did you mean weight?"),
        ("weight = 0\n", "environments.0.weight = 0 in mine.toml: must be at least 1e-09; "
         "try environments.0.weight = 1.0"),
        ("weight = 1e308\n[[environments]]\nname = 'bf'\nweight = 1e308\n",
         "environments.0.weight = 1e+308 in mine.toml: must be at most 1000000000.0; try"),
        ("weight = 5e-324\n", "environments.0.weight = 5e-324 in mine.toml: must be at least"),
        ("[[environments]]\nname = 'logic'\nweight = 1" + 400 * "0" + "\n",
         "environments.1.weight"),
        ("[sampling]\ntemperature = 1e-310\n",
         "sampling.temperature = 1e-310 in mine.toml: must be at least 0.001; try"),
        ("[common]\nshare = 5e-324\n", "common.tasks = 256: with common.share = 4.94066e-324"),
        ("[training]\nloss = 'sapo, clip_high=1e308'\n",
         "training.loss = sapo, clip_high=1e308 in mine.toml: "),
        ("parameters = 3\n", "environments.0.parameters = 3 in mine.toml: must be a table"),
        ("parameters = { day = 2024-01-01 }\n", "environments.0.parameters"),
        ("version = '7'\n", "environment scripted_sum: this run needs version 7, installed is 1"),
        ("name = 3\n", "mine.toml: not TOML"),
        ("[[environments]]\nweight = 2\n", "environments.1.name in mine.toml: is missing; add it"),
        ("[[environments]]\nname = 'no'\n", "environment no: no such environment; swarm-node env"),
        (
            "[training]\nloss = 'ppo'\n",
            "training.loss = ppo in mine.toml: no such method; take one of sapo, grpo, dapo, decou",
        ),
        (
            "[training]\nloss = 'tis, dual_clip=3'\n",
            "training.loss = tis, dual_clip=3 in mine.toml: tis takes no dual_clip; it takes aggre",
        ),
        ("[extra]\n", "extra in mine.toml: no such setting; known: answer, chat, common"),
    ],
)  # fmt: skip
def test_a_wrong_line_of_the_file_is_named(tmp_path: Path, after: str, line: str) -> None:
    assert told(path=run_file(tmp_path, after=after)).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('name = "x"\n', "environments in mine.toml: is missing; add it"),
        ('name = "x"\nenvironments = []\n', "environments =  in mine.toml: must have at least 1"),
        (
            'name = "x"\npublishers = ["12D3"]\nenvironments = [{ name = "scripted_sum" }]\n',
            "publishers.0 = 12D3 in mine.toml: not an Ed25519 peer id; swarm-node keygen prints",
        ),
        ('name = "A b"\n', "name = A b in mine.toml: must be up to 40 lower-case letters"),
        ("node = 3\n", "node in mine.toml: must be a table"),
    ],
)
def test_a_wrong_run_is_named(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert told(path=path).startswith(line)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert told(path=tmp_path / "none.toml").endswith(
        "give a TOML file or one of demo, sapo9, sums"
    )
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in told(path=binary)
    assert "Is a directory" in told(path=tmp_path)


def test_a_model_that_the_run_does_not_allow_is_refused(tmp_path: Path) -> None:
    path = run_file(tmp_path, before='models = ["a", "b"]\n')
    assert told({"model": "c"}, path=path) == ("--model c: run x allows only a, b; try --model a")


def test_a_node_that_only_takes_from_others_needs_no_group_of_its_own() -> None:
    assert load_config({"local_groups": 0, "group_size": 1}, {}).group_size == 1
    assert told({"local_groups": 0, "group_size": 0}).startswith("--group-size 0: must be at least")


def test_values_in_a_message_are_short_and_printable() -> None:
    line = told({"engine": "x\x1b[2J" + "y" * 500})
    assert "\x1b" not in line
    assert len(line) < 250


def test_every_field_has_a_flag_of_its_own() -> None:
    flags = [setting.option for setting in settings_of(NodeConfig).values()]
    assert len(set(flags)) == len(flags)
    assert {"--peer", "--local", "--external", "--group-size", "--data-dir"} <= set(flags)


def test_a_peer_may_be_named_through_a_relay() -> None:
    through = f"{PEER}/p2p-circuit/p2p/{BOB}"
    assert load_config({"peers": [through]}, {}).peers == (through,)
    for wrong in (f"{PEER}/p2p-circuit", f"{PEER}/p2p-circuit/p2p/12D3", through[:-1]):
        with pytest.raises(ConfigError):
            load_config({"peers": [wrong]}, {})


# --- invitations -------------------------------------------------------------------------------


def test_an_invitation_brings_its_peers_and_its_packaged_run() -> None:
    run = load_config({}, {}, Path("sapo9")).run
    text = Invitation(run.run_id, (PEER,), JoinKey(b"s" * 32)).encode()
    config = load_config({"invite": text}, {})
    assert config.run == run
    assert config.bootstrap == (PEER,)
    assert load_config({}, {"SWARM_NODE_INVITE": text}).bootstrap == (PEER,)
    assert load_config({"invite": text, "peers": [PEER]}, {}).bootstrap == (PEER,)
    assert text not in repr(config)


def test_an_invitation_to_another_run_is_refused() -> None:
    text = Invitation("other-123", (PEER,), JoinKey(b"s" * 32)).encode()
    with pytest.raises(ConfigError, match="to run other-123") as info:
        load_config({"invite": text}, {})
    assert text[10:] not in str(info.value)


def test_a_damaged_invitation_is_not_quoted() -> None:
    text = Invitation("demo-123", (PEER,), JoinKey(b"s" * 32)).encode()[:-3]
    for flags, environ in (({"invite": text}, {}), ({}, {"SWARM_NODE_INVITE": text})):
        with pytest.raises(ConfigError, match="copy it whole") as info:
            load_config(flags, environ)
        assert text[10:] not in str(info.value)
        assert "\n" not in str(info.value)


def learner_run(**learner: object) -> RunConfig:
    environments = [{"name": "scripted_sum"}]
    return RunConfig.model_validate(
        {"name": "led", "environments": environments, "learner": {"peer": ALICE, **learner}}
    )


def test_a_learner_publishes_weights_and_is_part_of_the_run() -> None:
    run = learner_run()
    assert run.learner is not None
    assert run.weights_publishers == (ALICE,)
    assert (run.learner.staleness_max, run.learner.publish_every) == (4, 3)
    other = learner_run(staleness_max=5)
    without = RunConfig.model_validate({"name": "led", "environments": [{"name": "scripted_sum"}]})
    assert len({run.run_id, other.run_id, without.run_id}) == 3


def test_a_node_of_a_learners_run_has_its_model_unless_it_is_told_another(tmp_path: Path) -> None:
    path = tmp_path / "led.toml"
    text = f"""
        name = "led"
        environments = [{{ name = "scripted_sum" }}]
        [learner]
        peer = "{ALICE}"
        model = "smollm2"
    """
    path.write_text(text)
    assert load_config({}, {}, path).model == "smollm2"
    assert load_config({}, {"SWARM_NODE_MODEL": "other"}, path).model == "other"
    assert load_config({"model": "another"}, {"SWARM_NODE_MODEL": "other"}, path).model == "another"
    path.write_text(text + '[node]\nmodel = "third"\n')
    assert load_config({}, {}, path).model == "third"


@pytest.mark.parametrize(("bound", "every"), [(0, 1), (1, 1), (2, 1), (6, 5)])
def test_how_often_a_learner_publishes_by_itself(bound: int, every: int) -> None:
    run = learner_run(staleness_max=bound)
    assert run.learner is not None
    assert run.learner.publish_every == every


def test_a_learner_that_publishes_too_rarely_is_refused() -> None:
    with pytest.raises(ConfigError, match="no group would be fresh enough; take at most 2"):
        learner_run(staleness_max=2, publish_every_steps=3)
