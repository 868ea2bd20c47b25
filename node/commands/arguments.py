"""What reads the arguments of `swarm-node`, and those of its smaller commands."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from swarm.peers.invite_flags import add_invitation, take_invitation

ANY_ADDRESS = "/ip4/0.0.0.0/tcp/0"
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and what was meant where a word is misspelt."""

    shows_settings = False  # whether its flags are a node's settings

    def format_help(self) -> str:
        """See `ArgumentParser`. What takes a value says its default; settings without a flag are
        named."""
        usual: Mapping[str, Any] = {}
        if self.shows_settings:
            from node.config import NodeConfig  # half a second, for who asks alone

            usual = {name: field.default for name, field in NodeConfig.model_fields.items()}
            others = ", ".join(
                sorted(usual.keys() - {each.dest for each in self._actions} - {"run"})
            )
            self.epilog = (
                "Settings without a flag, for SWARM_NODE_<NAME> or the [node] table of a run file: "
                f"{others}. swarm-node config shows all as they hold; docs/settings.md says what "
                "they are."
            )
        for action in self._actions:
            said = action.help or ""
            takes = action.option_strings and action.nargs != 0 and not action.required
            if takes and "default" not in said:
                default = usual.get(action.dest) if action.default is None else action.default
                told = [said.replace("%", "%%")] if said else []
                action.help = "; ".join([*told, f"default: {_shown(default)}"])
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `ArgumentParser`. A command's own parser refuses what it does not know."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            word = unknown[0].partition("=")[0]
            if word.startswith("-"):
                flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
                hint = _meant(word, flags) or f"{self.prog} --help lists them"
                self.error(f"there is no {word}; {hint}")
            self.error(f"{word} is one argument too many")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """One line, and the status of wrong input."""
        if choice := _CHOICE.search(message):
            word, known = choice[1], re.findall(r"'([^']*)'", choice[2])
            hint = _meant(word, known) or f"take one of {', '.join(known)}"
            message = f"there is no {word}; {hint}"
        elif message.startswith("the following arguments are required: "):
            message = f"{message}; {self.prog} --help says more"
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        default = ", ".join(default)
    return "none" if default in (None, "") else str(default)


def _meant(word: str, known: Iterable[str]) -> str:
    """Names that share a whole part with the word come before those that are spelt like it."""
    names, parts = list(known), _parts(word)
    near = [each for each in names if parts & _parts(each)]
    best: Sequence[str] = difflib.get_close_matches(word, near or names, 1, 0.0 if near else 0.6)
    return f"did you mean {best[0]}?" if best else ""


def _parts(name: str) -> set[str]:
    return set(re.split("[-_]+", name)) - {""}


def given(
    options: argparse.Namespace,
) -> tuple[dict[str, Any], Mapping[str, str], Path | None]:
    """Flags by field, environment, run file: where settings come from. Of commands that look at a
    node's data the node's own are what is not given."""
    from node.config import NodeConfig

    take_invitation(options)
    flags = {
        name: value
        for name, value in vars(options).items()
        if name in NodeConfig.model_fields and name != "run"
    }
    run_file = Path(options.run) if options.run else None
    if getattr(options, "as_joined", False):
        from node.config.joined import as_joined

        flags, run_file = as_joined(flags, os.environ, run_file)
    return flags, os.environ, run_file


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def add_switch(parser: argparse.ArgumentParser, *flags: str, help: str) -> None:
    """A flag that is off where it is not given."""
    parser.add_argument(*flags, action="store_true", default=None, help=help)


def add_policy(parser: argparse.ArgumentParser, *, as_joined: bool = False) -> None:
    """What a node trains, and where it keeps it. `as_joined`: by default as it was started."""
    run, model = ("that of the node",) * 2 if as_joined else ("demo", "tiny")
    parser.add_argument(
        "--run", metavar="FILE", help=f"a run file, a packaged run, or a run's id; default: {run}"
    )
    parser.add_argument(
        "--model",
        help="tiny, smollm2, a model directory, a GGUF file, or a Hugging Face id; "
        f"default: {model}",
    )
    add_switch(parser, "--yes", help="agree to what is fetched or plugged in")
    parser.set_defaults(as_joined=as_joined)
    parser.add_argument("--data-dir", metavar="DIR", help="default: swarm-data")


def add_lora(parser: argparse.ArgumentParser) -> None:
    """The adapter, if there is one. After `add_policy`, where there is that."""
    default = "that of the node" if parser.get_default("as_joined") else "0"
    parser.add_argument(
        "--lora-rank",
        metavar="N",
        help=f"train an adapter of this rank in place of the model; default: {default}",
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """What torch may use."""
    parser.add_argument(
        "--threads", metavar="N", help="torch's; 0, the default: a share of the cores"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """What samples, of `join` and `doctor`."""
    parser.add_argument(
        "--engine", help="torch (default), vllm, or openai: a server's model, without training"
    )
    parser.add_argument(
        "--engine-url", metavar="URL", help="of openai, such as http://127.0.0.1:8080/v1"
    )
    parser.add_argument("--engine-key-env", metavar="NAME", help="the variable with its key")
    parser.add_argument(
        "--engine-quantization", metavar="KIND", help="fp8 or int8: vLLM samples with such weights"
    )


def add_tools(commands: Any, whole: argparse.ArgumentParser) -> None:
    """`model`, `clean`, `env` and `completion`. `whole`: all of the command line."""
    add_model(commands)
    add_clean(commands)
    add_env(commands)
    add_completion(commands, whole)


def add_runs(commands: Any, config_of: Callable[[argparse.Namespace], Any]) -> None:
    """`swarm-node runs`. `config_of`: the settings by flags."""

    def run_command(options: argparse.Namespace) -> int:
        from node.commands.doctor import list_runs

        return list_runs(config_of(options), _say)

    runs = commands.add_parser("runs", help="which runs peers take part in, and what each needs")
    runs.add_argument(
        "--peer", dest="peers", action="append", metavar="ADDR", help="a node to ask; repeatable"
    )
    add_invitation(runs, "ask the nodes of an invitation")
    runs.set_defaults(run_command=run_command, run=None)


def add_completion(commands: Any, whole: argparse.ArgumentParser) -> None:
    """`swarm-node completion`, of the whole command line."""
    completion = commands.add_parser("completion", help="what a shell needs to complete commands")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which one")
    completion.set_defaults(run_command=lambda options: _completion(options.shell, whole))


def _completion(shell: str, whole: argparse.ArgumentParser) -> int:
    import shtab

    _complete_paths(whole, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY})
    _say(shtab.complete(whole, shell))
    return EXIT_OK


def _complete_paths(parser: argparse.ArgumentParser, kinds: Mapping[str, Any]) -> None:
    """Have arguments complete to names of files that are such."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_paths(each, kinds)
        elif (kind := kinds.get(str(action.metavar).upper())) is not None or action.type is Path:
            action.complete = kind or kinds["FILE"]  # type: ignore[attr-defined]


def add_model(commands: Any) -> None:
    """`swarm-node model`."""
    model = commands.add_parser("model", help="models that need no hub: smollm2")
    actions = model.add_subparsers(required=True, metavar="ACTION")
    get = actions.add_parser("get", help="fetch a model and convert it, once")
    get.add_argument("name", metavar="NAME", help="smollm2")
    get.set_defaults(run_command=_get_model)
    ls = actions.add_parser("ls", help="the models that can be fetched, and which are here")
    ls.set_defaults(run_command=_list_models)
    for action in (get, ls):
        action.add_argument(
            "--cache-dir", type=Path, metavar="DIR", help="default: the user's cache"
        )


def add_clean(commands: Any) -> None:
    """`swarm-node clean`."""
    clean = commands.add_parser("clean", help="remove models and policies that are kept here")
    clean.add_argument("--cache-dir", type=Path, metavar="DIR", help="default: the user's cache")
    clean.add_argument("--yes", action="store_true", help="agree to it")
    clean.set_defaults(run_command=_clean)


def _clean(options: argparse.Namespace) -> int:
    from node.commands.model import clean
    from node.hosting.fetched_models import ask

    clean(options.cache_dir, ask(options.yes, by_default=False), _say)
    return EXIT_OK


def _get_model(options: argparse.Namespace) -> int:
    from node.commands.model import get_model

    _say(str(get_model(options.name, options.cache_dir, _say)))
    return EXIT_OK


def _list_models(options: argparse.Namespace) -> int:
    from node.commands.model import list_models

    for line in list_models(options.cache_dir):
        _say(line)
    return EXIT_OK


def add_env(commands: Any) -> None:
    """`swarm-node env`."""
    env = commands.add_parser("env", help="environments: which there are, and one of your own")
    actions = env.add_subparsers(required=True, metavar="ACTION")
    ls = actions.add_parser("list", help="all by group, plug-ins, and what is refused and why")
    ls.set_defaults(run_command=_list_environments)
    show = actions.add_parser("show", help="parameters, scorer, and a problem with its answer")
    show.set_defaults(run_command=_show_environment)
    tried = actions.add_parser("try", help="answer a problem, and see what that is worth")
    tried.set_defaults(run_command=_try_environment)
    check = actions.add_parser("check", help="whether strangers' text may be given to it")
    check.set_defaults(run_command=_check_environment)
    for action in (show, tried, check):
        action.add_argument("name", metavar="NAME", help="an environment, or module:attribute")
        action.add_argument(
            "--parameters", default="{}", metavar="JSON", help="as a run gives them; default: {}"
        )
    tried.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another one, another problem"
    )
    tried.add_argument("--model", metavar="NAME", help="who answers: tiny, smollm2 or a directory")
    tried.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="in a model's answer"
    )
    new = actions.add_parser("new", help="write a package with an environment to begin with")
    new.add_argument(
        "directory", type=Path, metavar="DIR", help="to write; its name is the package's"
    )
    new.set_defaults(run_command=_new_environment)


def _list_environments(_: argparse.Namespace) -> int:
    from node.commands.environments import list_environments

    list_environments(_say)
    return EXIT_OK


def _show_environment(options: argparse.Namespace) -> int:
    from node.commands.environments import show_environment

    show_environment(options.name, options.parameters, _say)
    return EXIT_OK


def _try_environment(options: argparse.Namespace) -> int:
    from node.commands.environments import model_that_answers, try_environment

    answered = (
        model_that_answers(options.model, options.max_new_tokens, _say) if options.model else _typed
    )
    try_environment(options.name, options.parameters, options.seed, answered, _say)
    return EXIT_OK


def _typed(_said: str, one_line: bool) -> str:
    """All of standard input, or its next line."""
    if sys.stdin.isatty():
        _say("--- your turn:" if one_line else "--- your answer, then Ctrl-D:")
    return sys.stdin.readline() if one_line else sys.stdin.read()


def _check_environment(options: argparse.Namespace) -> int:
    from node.commands.environment_check import check_environment

    is_fit = check_environment(options.name, options.parameters, _say)
    return EXIT_OK if is_fit else EXIT_FAILED


def _new_environment(options: argparse.Namespace) -> int:
    from node.commands.environments import new_environment

    new_environment(options.directory, _say)
    return EXIT_OK
