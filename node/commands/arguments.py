"""The parser of `swarm-node`, and its smaller commands."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from swarm.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from swarm.errors import ConfigError
from swarm.texts import printable

if TYPE_CHECKING:
    from node.config.described import Setting

Command = Callable[[argparse.Namespace], int | None]  # None: `EXIT_OK`
_METAVARS = {int: "N", float: "X", Path: "FILE"}
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose flags may be settings of a node."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.allow_abbrev = False  # the beginning of a flag is often that of several
        self._wanted: tuple[str, ...] | None = None  # settings; empty: all
        self._as_joined = False
        self.settings: dict[str, Setting] = {}  # that it takes, by name

    def take_settings(self, *names: str, as_joined: bool = False) -> None:
        """Take these settings as flags, or all if none is named. `as_joined`: other settings come
        from the node's last start. The parser adds the flags at its first use, because the import
        is slow."""
        self._wanted, self._as_joined = names, as_joined
        self.set_defaults(as_joined=as_joined)

    def fill(self) -> None:
        names, self._wanted = self._wanted, None
        if names is None:
            return
        from node.config.described import groups_of
        from node.config.node import NodeConfig

        for title, settings in groups_of(NodeConfig):
            group = self if names else self.add_argument_group(title)
            for setting in settings:
                if not names or setting.name in names:
                    self.settings[setting.name] = setting
                    _add_setting(group, setting)
        if not names:
            words = [f"[{each.metavar}] " for each in self._get_positional_actions()]
            self.usage = f"%(prog)s {''.join(words)}[SETTING ...]"
            self.add_argument("--help-all", action=_HelpAll, help="show every setting, and exit")

    def format_help(self) -> str:
        """The help with the settings that are often given."""
        return self.help_text(whole=False)

    def help_text(self, *, whole: bool) -> str:
        """The help, with one sentence for each setting; `whole`: all of its meaning and bounds."""
        self.fill()
        for action in self._actions:
            setting = self.settings.get(action.dest)
            if setting is not None:
                action.help = self._help_of(setting, whole=whole)
            elif action.option_strings and action.nargs != 0 and not action.required:
                default = "none" if action.default in (None, "") else action.default
                if "default" not in (action.help or ""):
                    action.help = f"{action.help or ''}; default: {default}".replace("%", "%%")
        return super().format_help()

    def _help_of(self, setting: "Setting", *, whole: bool) -> str:
        takes_all = self.usage is not None
        if takes_all and not whole and not setting.flag.often:
            return argparse.SUPPRESS
        default = "demo" if setting.name == "run" else setting.default
        if self._as_joined and setting.name in ("run", "model", "lora_rank"):
            default = "that of the node"
        text = f"{setting.brief}; default: {default}"
        if whole:
            is_listed = setting.annotation is bool or get_origin(setting.annotation) is Literal
            kind = "" if is_listed else f"{setting.kind}; "
            text = f"{setting.meaning.replace('`', '')} ({kind}default: {default})"
        return text.replace("%", "%%")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in the base class; but a command's own parser refuses unknown arguments."""
        self.fill()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            word = unknown[0].partition("=")[0]
            if word.startswith("-"):
                flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
                lists = "--help-all" if "--help-all" in flags else "--help"
                hint = _meant(word, flags) or f"{self.prog} {lists} lists them"
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


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, *_: Any) -> None:
        sys.stdout.write(parser.help_text(whole=True))
        parser.exit()


def _add_setting(group: Any, setting: "Setting") -> None:
    options, flag, type_ = [setting.option], setting.flag, setting.annotation
    if flag.alias:
        options.append(f"--{flag.alias}" if len(flag.alias) > 1 else f"-{flag.alias}")
    if setting.name == "invite":
        from swarm.peers.invite_flags import add_invitation

        add_invitation(group, setting.brief)
        return
    kinds: dict[str, Any] = {"metavar": flag.metavar or _METAVARS.get(type_, "TEXT")}
    if type_ is bool:
        kinds = {"action": argparse.BooleanOptionalAction}
    elif get_origin(type_) is tuple:
        kinds |= {"action": "extend", "type": lambda text: text.split(",")}
        kinds["metavar"] = flag.metavar or _METAVARS.get(get_args(type_)[0], "TEXT")
    elif get_origin(type_) is Literal:
        kinds["metavar"] = "{" + ",".join(get_args(type_)) + "}"
    group.add_argument(*options, dest=setting.name, default=None, help=setting.brief, **kinds)


def fill_all(parser: argparse.ArgumentParser) -> None:
    """Add the flags of settings to a parser and to those of its commands."""
    if isinstance(parser, Parser):
        parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                fill_all(each)


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
    """Flags by field, the environment and the run file: the sources of settings."""
    from node.config import NodeConfig
    from swarm.peers.invite_flags import take_invitation

    take_invitation(options)
    _take_links(options)
    flags = {
        name: value
        for name, value in vars(options).items()
        if name in NodeConfig.model_fields and name != "run"
    }
    run_file = Path(options.run) if getattr(options, "run", None) else None
    fork = getattr(options, "fork", None)
    if getattr(options, "as_joined", False) or fork:
        from node.config.joined import as_joined

        source = Path(fork.rpartition("@")[0]) if fork else None
        flags, run_file = as_joined(flags, os.environ, run_file, source)
    return flags, os.environ, run_file


def _take_links(options: argparse.Namespace) -> None:
    """Put addresses, links and invitations where flags would: into peers, invitation and model."""
    from swarm.peers.invite import INVITE_PREFIX, Invitation

    given, peers = getattr(options, "invite", None), list[str]()
    link, options.link = getattr(options, "link", None), None
    invites = {given} if given else set()
    for word in (*([link] if link else ()), *(getattr(options, "peers", None) or ())):
        if word.startswith(INVITE_PREFIX):
            invites.add(word)
        elif (found := Invitation.of_link(word)) is not None:
            peers += found.addresses
            invites.add(Invitation(found.run_id, (), model=found.model).encode())
        else:
            peers.append(word)
    if len(invites) > 1:
        raise ConfigError("these links and invitations differ in run or model; take one of them")
    options.peers, options.invite = peers or None, next(iter(invites), None)
    invited = options.invite or os.environ.get("SWARM_NODE_INVITE")
    is_set = getattr(options, "model", "") is not None or "SWARM_NODE_MODEL" in os.environ
    if invited and not is_set:
        options.model = _invited_model(invited)


def _invited_model(invited: str) -> str | None:
    from node.config import NodeConfig
    from node.policies.presets import PRESETS
    from swarm.peers.invite import Invitation

    try:
        model = Invitation.decode(invited).model
    except ConfigError:
        return None  # told when all settings are checked
    if model not in ("", NodeConfig.model_fields["model"].default, *PRESETS):
        shown = printable(model, 64)
        raise ConfigError(f"the link's model {shown!r} is not known here; name one with --model")
    return model or None


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def add_command(commands: Any, name: str, run: Command, help: str, about: str = "") -> Parser:
    """The parser of a new command. `about` follows the usage in its help."""
    parser: Parser = commands.add_parser(name, help=help, description=about or None)
    parser.set_defaults(run_command=run)
    return parser


def add_data_dir(parser: Parser) -> None:
    parser.add_argument(
        "--data-dir", type=Path, default=Path("swarm-data"), metavar="DIR", help="the node's"
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
        if options.mine is not None:
            from node.commands.starts import list_starts

            return list_starts(options.cache_dir, options.mine, say)
        from node.commands.doctor import list_runs

        return list_runs(config_of(options), say)

    told = "which runs peers take part in, and what each needs; or the starts on this machine"
    runs = add_command(commands, "runs", run_command, told)
    runs.take_settings("peers", "invite", "cache_dir")
    runs.add_argument(
        "--mine",
        nargs="*",
        metavar="START",
        help="the nodes that were started on this machine; of two names: their differences",
    )


def add_completion(commands: Any, whole: argparse.ArgumentParser) -> None:
    def run_command(options: argparse.Namespace) -> None:
        import shtab

        fill_all(whole)
        _complete_paths(whole, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY})
        say(shtab.complete(whole, options.shell))

    told = "what a shell needs to complete commands"
    completion = add_command(commands, "completion", run_command, told)
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which one")


def _complete_paths(parser: argparse.ArgumentParser, kinds: Mapping[str, Any]) -> None:
    """Let arguments for files and directories complete to their names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_paths(each, kinds)
        elif (kind := kinds.get(str(action.metavar).upper())) is not None or action.type is Path:
            action.complete = kind or kinds["FILE"]  # type: ignore[attr-defined]


def add_model(commands: Any) -> None:
    model = commands.add_parser("model", help="models that need no hub: smollm2")
    actions = model.add_subparsers(required=True, metavar="ACTION")
    get = add_command(actions, "get", _get_model, "fetch a model and convert it, once")
    get.add_argument("name", metavar="NAME", help="smollm2")
    ls = add_command(actions, "ls", _list_models, "the models that can be fetched, those here")
    for action in (get, ls):
        _add_cache_dir(action)


def _add_cache_dir(parser: Parser) -> None:
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="default: the user's cache")


def add_clean(commands: Any) -> None:
    clean = add_command(commands, "clean", _clean, "remove models and policies that are kept here")
    _add_cache_dir(clean)
    clean.add_argument("--yes", action="store_true", help="agree to it")


def _clean(options: argparse.Namespace) -> None:
    from node.commands.policy import clean
    from node.hosting.fetched_models import ask

    clean(options.cache_dir, ask(options.yes, by_default=False), say)


def _get_model(options: argparse.Namespace) -> None:
    from node.commands.policy import get_model

    say(str(get_model(options.name, options.cache_dir, say)))


def _list_models(options: argparse.Namespace) -> None:
    from node.commands.policy import list_models

    for line in list_models(options.cache_dir):
        say(line)


def add_env(commands: Any) -> None:
    env = commands.add_parser("env", help="environments: which there are, and one of your own")
    actions = env.add_subparsers(required=True, metavar="ACTION")
    told = "all by group, plug-ins, and what is refused and why"
    add_command(actions, "list", _list_environments, told)
    told = "parameters, scorer, and a problem with its answer"
    show = add_command(actions, "show", _show_environment, told)
    told = "answer a problem, and see what that is worth"
    tried = add_command(actions, "try", _try_environment, told)
    told = "whether strangers' text may be given to it"
    check = add_command(actions, "check", _check_environment, told)
    for action in (show, tried, check):
        action.add_argument("name", metavar="NAME", help="an environment, or module:attribute")
        action.add_argument(
            "--parameters", default="{}", metavar="JSON", help="as a run gives them; default: {}"
        )
    tried.add_argument("--seed", type=int, default=0, metavar="N", help="which problem")
    tried.add_argument("--model", metavar="NAME", help="who answers: tiny, smollm2 or a directory")
    tried.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="in a model's answer"
    )
    told = "write a package with an environment to begin with"
    new = add_command(actions, "new", _new_environment, told)
    new.add_argument("directory", type=Path, metavar="DIR", help="to write; names the package")


def _list_environments(_: argparse.Namespace) -> None:
    from node.commands.environments import list_environments

    list_environments(say)


def _show_environment(options: argparse.Namespace) -> None:
    from node.commands.environments import show_environment

    show_environment(options.name, options.parameters, say)


def _try_environment(options: argparse.Namespace) -> None:
    from node.commands.environments import model_that_answers, try_environment

    answered = (
        model_that_answers(options.model, options.max_new_tokens, say) if options.model else _typed
    )
    try_environment(options.name, options.parameters, options.seed, answered, say)


def _typed(_said: str, one_line: bool) -> str:
    """All of standard input, or its next line."""
    if sys.stdin.isatty():
        say("--- your turn:" if one_line else "--- your answer, then Ctrl-D:")
    return sys.stdin.readline() if one_line else sys.stdin.read()


def _check_environment(options: argparse.Namespace) -> int:
    from node.commands.environments import check_environment

    is_fit = check_environment(options.name, options.parameters, say)
    return EXIT_OK if is_fit else EXIT_FAILED


def _new_environment(options: argparse.Namespace) -> None:
    from node.commands.environments import new_environment

    new_environment(options.directory, say)
