"""Loads settings: flags, then `SWARM_NODE_<FIELD>`, then `[node]` of the run file, then
defaults."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from node.config.errors import ENVIRON, FLAGS, Source, config_error
from node.config.node import Conflict, NodeConfig
from node.config.run import RUN_HASH_CHARS, RunConfig
from node.methods.choices import KNOWN
from node.methods.own import names_file
from node.system.child_environment import ENVIRON_PREFIX, PASSPHRASE_VARIABLE
from swarm.errors import ConfigError
from swarm.peers.invite import Invitation
from swarm.telemetry.broker_address import PASSWORD_VARIABLE

RUN_VARIABLE = "SWARM_NODE_RUN"
DEFAULT_RUN = "demo"
RUN_FILE_BYTES_MAX = 1_048_576
HANDED_ON = "runs"  # in the data directory: rules that peers handed on, by the run's id
_RUN_ID: Final = re.compile(rf"[^/]+-[0-9a-f]{{{RUN_HASH_CHARS}}}")


def packaged_runs() -> tuple[str, ...]:
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in files("node.config").joinpath("runs").iterdir()
            if entry.name.endswith(".toml")
        )
    )


@cache
def packaged_run_ids() -> Mapping[str, str]:
    """The names of packaged runs by their ids."""
    return {load_run(Path(name), {})[0].run_id: name for name in packaged_runs()}


def run_argument(run: RunConfig) -> str:
    """The value of `--run` on any machine; empty for the default run."""
    name = packaged_run_ids().get(run.run_id, run.run_id)
    return "" if name == DEFAULT_RUN else name


def handed_on_path(data_dir: Path, run_id: str) -> Path:
    """The file of a run's rules that a peer sent."""
    return data_dir / HANDED_ON / f"{run_id}.json"


def data_dir_of(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path:
    """The data directory by flags and environment."""
    default = NodeConfig.model_fields["data_dir"].default
    return Path(flags.get("data_dir") or environ.get(f"{ENVIRON_PREFIX}DATA_DIR") or default)


def unknown_run(
    flags: Mapping[str, Any], environ: Mapping[str, str], run_file: Path | None
) -> str | None:
    """The id of the wanted run if its rules are not on this machine."""
    wanted = _wanted(run_file or _invited_run(flags, environ), environ)
    if not _is_run_id(wanted) or wanted in packaged_run_ids():
        return None
    return None if handed_on_path(data_dir_of(flags, environ), wanted).exists() else wanted


def _wanted(run_file: Path | None, environ: Mapping[str, str]) -> str:
    return str(run_file) if run_file is not None else environ.get(RUN_VARIABLE, DEFAULT_RUN)


def _is_run_id(wanted: str) -> bool:
    """True if a text is a run's id and not a file's path."""
    try:
        return bool(_RUN_ID.fullmatch(wanted)) and not Path(wanted).exists()
    except OSError:  # such as a name that no file can have
        return True


@dataclass(frozen=True, slots=True)
class _RunFile:
    label: str
    text: str
    folder: Path | None = None  # of a file that the user wrote
    handed_on: str = ""  # the run's id, where a peer handed the rules on


def _read_run_file(wanted: str, data_dir: Path | None) -> _RunFile:
    """The run file of a path, a packaged run, or an id whose rules peers sent to `data_dir`."""
    path, run_id = Path(wanted), ""
    if _is_run_id(wanted):
        wanted = packaged_run_ids().get(wanted, wanted)
        if data_dir is not None and wanted not in packaged_runs():
            path, run_id = handed_on_path(data_dir, wanted), wanted
            if not path.exists():
                raise ConfigError(
                    f"--run {wanted}: the rules of this run are not here; join with "
                    "--peer or --invite, and a node of the run hands them on, or give its file"
                )
    if wanted in packaged_runs():
        label = f"{wanted}.toml"
        text = files("node.config").joinpath("runs", label).read_text(encoding="utf-8")
        return _RunFile(label, text)
    try:
        with path.open("rb") as file:
            raw = file.read(RUN_FILE_BYTES_MAX + 1)
        if len(raw) > RUN_FILE_BYTES_MAX:
            raise ConfigError(f"--run {wanted}: larger than {RUN_FILE_BYTES_MAX} bytes")
        folder = None if path.suffix == ".json" else path.parent
        return _RunFile(path.name, raw.decode(), folder, run_id)
    except OSError as error:
        raise ConfigError(
            f"--run {wanted}: {error.strerror}; give a TOML file or one of "
            f"{', '.join(packaged_runs())}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--run {wanted}: not UTF-8 text; give a TOML file") from None


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings from `SWARM_NODE_<FIELD>`. Unknown ones are kept, so that a typo is refused."""
    passphrase = environ.get(f"{ENVIRON_PREFIX}PASSPHRASE_ENV", PASSPHRASE_VARIABLE)
    others = {RUN_VARIABLE, PASSPHRASE_VARIABLE, PASSWORD_VARIABLE, passphrase}
    return {
        name.removeprefix(ENVIRON_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENVIRON_PREFIX) and name not in others
    }


def load_run(
    run_file: Path | None, environ: Mapping[str, str], data_dir: Path | None = None
) -> tuple[RunConfig, dict[str, Any]]:
    """The run, and the `[node]` table of its file. `data_dir` has the rules that peers sent."""
    return _run_of(_read_run_file(_wanted(run_file, environ), data_dir))


def _run_of(file: _RunFile) -> tuple[RunConfig, dict[str, Any]]:
    label = file.label
    try:
        is_json = label.endswith(".json")
        table = json.loads(file.text) if is_json else tomllib.loads(file.text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{label}: not TOML ({error}); correct the file") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{label}: not JSON; delete it and join again") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{label}: holds no settings; delete it and join again")
    node_table = table.pop("node", {})
    if not isinstance(node_table, dict):
        raise ConfigError(f"node in {label}: must be a table; write [node]")
    try:
        run = RunConfig.model_validate(table, context=file.folder)
    except ValidationError as error:
        raise config_error(error, RunConfig, lambda _: Source.in_file(label)) from None
    if file.handed_on not in ("", run.run_id):
        raise ConfigError(
            f"{label}: holds the rules of {run.run_id}; delete it and join again with --peer"
        )
    return run, node_table


def _invited_run(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """The run of the invitation, unless another run is named."""
    text = flags.get("invite") or environ.get(f"{ENVIRON_PREFIX}INVITE")
    if not text or RUN_VARIABLE in environ:
        return None
    try:
        run_id = Invitation.decode(str(text)).run_id
    except ConfigError:
        return None  # told when all settings are checked
    return Path(run_id) if _RUN_ID.fullmatch(run_id) else None


def load_config(
    flags: Mapping[str, Any], environ: Mapping[str, str], run_file: Path | None = None
) -> NodeConfig:
    """All settings of this node. Flags are by field name; None means not given. `run_file`: a path,
    a packaged run's name or a run's id; None: `SWARM_NODE_RUN`, else the run of the invitation,
    else the demo.

    Raises:
        ConfigError: one line that names the setting, its value and the fix.
    """
    return load_with_sources(flags, environ, run_file)[0]


def load_with_sources(
    flags: Mapping[str, Any], environ: Mapping[str, str], run_file: Path | None = None
) -> tuple[NodeConfig, Mapping[str, Source]]:
    """As `load_config`, with the source of each setting that is not a default."""
    wanted = _wanted(run_file or _invited_run(flags, environ), environ)
    file = _read_run_file(wanted, data_dir_of(flags, environ))
    run, node_table = _run_of(file)
    label = file.label
    of_learner = {} if run.learner is None else {"model": run.learner.model}
    for field in KNOWN.keys() & node_table.keys():
        if names_file(node_table[field]):
            told = "names a file; give it by a flag or the environment: others' code is not run"
            raise ConfigError(f"{label}: node.{field} = {node_table[field]!r}: {told}")
    layers: list[tuple[Source, Mapping[str, Any]]] = [
        (Source.in_file(label, "learner."), of_learner),
        (Source.in_file(label, "node."), node_table),
        (ENVIRON, _from_environ(environ)),
        (FLAGS, {name: value for name, value in flags.items() if value is not None}),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    sources["run"] = Source.in_file(label)
    values["run"] = run

    def source_of(field: str) -> Source:
        return sources.get(field, FLAGS) if field != "run" else FLAGS

    try:
        return NodeConfig.model_validate(values), sources
    except ValidationError as error:
        raise config_error(error, NodeConfig, source_of) from None
    except Conflict as conflict:
        value = values.get(conflict.field, NodeConfig.model_fields[conflict.field].default)
        raise ConfigError(
            source_of(conflict.field).message(conflict.field, value, conflict.problem, conflict.fix)
        ) from None
