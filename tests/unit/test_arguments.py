"""What is wrong with a command line is said in one line, and what was meant."""

from argparse import SUPPRESS, ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli import _parser, main
from node.commands.arguments import given
from node.config import NodeConfig, load_config, load_run
from node.config.described import settings_of
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.peers.invite import Invitation

RUN = load_run(Path("sums"), {})[0]
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{Identity(b'a' * 32).peer_id}"
(LINK,) = Invitation(RUN.run_id, (ADDRESS,), model="smollm2").links


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("jion", "swarm-node: there is no jion; did you mean join?"),
        ("join --ronds 3", "swarm-node join: there is no --ronds; did you mean --rounds?"),
        ("join --learning_rate=1", "join: there is no --learning_rate; did you mean --learning-r"),
        ("join --rate 1", "there is no --rate; did you mean --learning-rate?"),
        ("join --local-groups 4", "there is no --local-groups; did you mean --local?"),
        ("join --round 3", "there is no --round; did you mean --rounds?"),
        ("weights fetch --follo", "there is no --follo; did you mean --follow?"),
        ("join --zzz", "swarm-node join: there is no --zzz; swarm-node join --help-all lists them"),
        ("join here there", "swarm-node join: there is one argument too many"),
        ("weights publsh x", "swarm-node weights: there is no publsh; did you mean publish?"),
        ("model get", "arguments are required: NAME; swarm-node model get --help says more"),
        ("", "arguments are required: COMMAND; swarm-node --help says more"),
    ],
)
def test_one_line_says_what_was_meant(line: str, said: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error


def test_a_word_that_is_like_nothing_gets_the_list(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["zzz"])
    error = capsys.readouterr().err
    assert "there is no zzz; take one of join, learn, invite, " in error
    assert "did you mean" not in error


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_is_short_and_the_rest_is_a_flag_away(capsys) -> None:
    for command in ("join", "learn"):
        short, whole = help_of(capsys, command, "--help"), help_of(capsys, command, "--help-all")
        default = NodeConfig.model_fields["evaluate_every_rounds"].default
        assert f"evaluations on the held-out tasks; default: {default} " in short
        assert "--coordinator PEER" in short
        assert "--serve-bytes-per-s-max" not in short
        assert (
            "--serve-bytes-per-s-max N The rate at which the node serves groups at most. (whole "
            "number, bytes/s, at least 1; default: 8388608)" in whole
        )
        for setting in settings_of(NodeConfig).values():
            assert f"{setting.option} " in whole.replace(",", " ")
            assert (f"{setting.option} " in short.replace(",", " ")) == setting.flag.often
    assert "as the node" not in help_of(capsys, "eval", "--help")
    assert "or a hub id; default: that of the node" in help_of(capsys, "eval", "--help")
    assert "serve-bytes" not in help_of(capsys, "status", "--help")


def test_whatever_takes_a_value_says_its_default() -> None:
    flags = 0
    for command, parser in commands_of(_parser()):
        parser.format_help()
        for action in parser._actions:
            if action.option_strings and action.nargs != 0 and not action.required:
                is_hidden = action.help == SUPPRESS
                said = (action.help or "").count("default")
                assert is_hidden or said == 1, (command, action.option_strings)
                flags += 1
    assert flags > 200


def test_flags_say_what_settings_hold() -> None:
    """Lists may be repeated or have commas, and each switch can be turned off."""
    words = "join --no-lan --relay --peer a,b --peer c --quiet-hours 22:00-07:00 --steps 3 -v"
    flags = given(_parser().parse_args(words.split()))[0]
    assert {name: value for name, value in flags.items() if value is not None} == {
        "lan": False,
        "relay": True,
        "peers": ["a", "b", "c"],
        "quiet_hours": ["22:00-07:00"],
        "rounds": "3",
        "verbose": True,
    }


@pytest.mark.parametrize("how", [[LINK], ["--peer", LINK], [LINK, "--peer", LINK]])
def test_a_link_sets_peer_run_and_model(how: list[str]) -> None:
    flags, _, run_file = given(_parser().parse_args(["join", *how]))
    config = load_config(flags, {}, run_file)
    assert set(config.bootstrap) == {ADDRESS}
    assert (config.run.run_id, config.model) == (RUN.run_id, "smollm2")
    flags, _, run_file = given(_parser().parse_args(["join", *how, "--model", "tiny"]))
    assert load_config(flags, {}, run_file).model == "tiny"


def test_an_address_in_place_of_a_link_is_a_peer_and_an_invitation_is_one() -> None:
    assert given(_parser().parse_args(["join", ADDRESS]))[0]["peers"] == [ADDRESS]
    text = Invitation(RUN.run_id, (ADDRESS,), model="smollm2").encode()
    flags = given(_parser().parse_args(["join", text]))[0]
    assert (flags["invite"], flags["model"]) == (text, "smollm2")
    for wrong, told in (([text, "--peer", LINK], "differ"), ([f"{LINK}x"], "not known here")):
        with pytest.raises(ConfigError, match=told):
            given(_parser().parse_args(["join", *wrong]))


def commands_of(parser: ArgumentParser, name: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for word, each in action.choices.items():
                yield from commands_of(each, f"{name} {word}".strip())
