"""What is wrong with a command line is said in one line, and what was meant."""

from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator

import pytest

from node.cli import _parser, main
from node.commands.arguments import ANY_ADDRESS
from node.config import NodeConfig


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("jion", "swarm-node: there is no jion; did you mean join?"),
        ("join --ronds 3", "swarm-node join: there is no --ronds; did you mean --rounds?"),
        ("join --learning_rate=1", "join: there is no --learning_rate; did you mean --learning-r"),
        ("join --rate 1", "there is no --rate; did you mean --learning-rate?"),
        ("join --local-groups 4", "there is no --local-groups; did you mean --local?"),
        ("join --zzz", "swarm-node join: there is no --zzz; swarm-node join --help lists them"),
        ("join here", "swarm-node join: here is one argument too many"),
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


def test_help_says_defaults_and_names_what_has_no_flag(capsys) -> None:
    for command in ("join", "learn"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        default = NodeConfig.model_fields["evaluate_every_rounds"].default
        assert f"rounds; 0: never; default: {default}" in said
        assert "default: swarm-data; default" not in said
        assert "serve_bytes_per_s_max" in said
        without = said.partition("Settings without a flag")[2]
        assert (" coordinator, " in without) is (command == "join")
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    assert "Settings without a flag" not in capsys.readouterr().out


def test_whatever_takes_a_value_says_its_default() -> None:
    flags = 0
    for command, parser in commands_of(_parser()):
        parser.format_help()
        for action in parser._actions:
            if action.option_strings and action.nargs != 0 and not action.required:
                assert (action.help or "").count("default") == 1, (command, action.option_strings)
                flags += 1
    assert flags > 100


def test_defaults_that_are_written_by_hand_are_those_of_the_settings() -> None:
    usual = {name: field.default for name, field in NodeConfig.model_fields.items()}
    assert usual["listen"] == (ANY_ADDRESS,)
    assert (usual["model"], usual["lora_rank"], usual["threads"]) == ("tiny", 0, 0)
    assert str(usual["data_dir"]) == "swarm-data"
    assert usual["telemetry_interval_s"] == 2


def commands_of(parser: ArgumentParser, name: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for word, each in action.choices.items():
                yield from commands_of(each, f"{name} {word}".strip())
