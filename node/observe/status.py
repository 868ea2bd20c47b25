"""`swarm-node status`: a running node answers on a socket that only its own user can open.

A client gets one JSON object; nothing is read from it. The path of a Unix socket has at most about
100 bytes: a node with a longer data directory listens in the user's runtime directory, and leaves a
pointer file, `status.path`, in the data directory.
"""

import hashlib
import json
import os
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

import trio
from pydantic import TypeAdapter, ValidationError
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from node.observe import figures
from node.observe.event_log import plain_json
from node.observe.records import BanStatus, PeerStatus, StatusSnapshot
from node.observe.text_format import amount, duration, printable, short_id, terminal_width
from node.system.bounded_server import CLIENTS_MAX, serve_answers
from swarm.errors import ConfigError, RequestTimeout
from swarm.peers.invite import Invitation

SOCKET_NAME: Final = "status.sock"
POINTER_NAME: Final = "status.path"
SOCKET_PATH_BYTES_MAX: Final = 100  # AF_UNIX allows 108 on Linux and 104 on macOS
ANSWER_TIMEOUT_S: Final = 2.0
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
PEERS_SHOWN_MAX: Final = 32
BANS_SHOWN_MAX: Final = 16

_SNAPSHOT: TypeAdapter[StatusSnapshot] = TypeAdapter(StatusSnapshot)


def snapshot_json(snapshot: StatusSnapshot) -> str:
    """The snapshot as one JSON object; the inverse is `fetch_status`'s."""
    return json.dumps(plain_json(asdict(snapshot)), allow_nan=False)


async def serve_status(
    data_dir: Path,
    snapshot: Callable[[], StatusSnapshot],
    unanswered: Counter[str],
    *,
    task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled; reports the socket's path once it listens.

    `snapshot` is called on the event loop for each client and must be quick. A client that does
    not read is dropped after `ANSWER_TIMEOUT_S`. `unanswered`: as of `serve_answers`.

    Raises:
        ConfigError: a live node answers on this data directory already, or no socket can be made.
    """
    path = socket_path(data_dir)
    listener = _listen(data_dir, path)

    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(snapshot_json(snapshot()).encode())

    try:
        async with listener:
            task_status.started(path)
            await serve_answers(answer, [listener], unanswered, timeout_s=ANSWER_TIMEOUT_S)
    finally:
        path.unlink(missing_ok=True)
        (data_dir / POINTER_NAME).unlink(missing_ok=True)


def socket_path(data_dir: Path) -> Path:
    """The socket of this data directory's node: in it, or, if that path is too long for a socket,
    in a directory of the user's own."""
    path = data_dir.absolute() / SOCKET_NAME
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    name = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16] + ".sock"
    folder = f"swarm-node-{os.getuid()}"
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not base or not os.access(base, os.W_OK):
            continue
        short = Path(base).absolute() / folder / name
        if len(os.fsencode(short)) <= SOCKET_PATH_BYTES_MAX:
            return short
    raise ConfigError(f"data directory {data_dir}: its path is too long, choose a shorter one")


def _listen(data_dir: Path, path: Path) -> trio.SocketListener:
    try:
        if path.parent == data_dir.absolute():
            (data_dir / POINTER_NAME).unlink(missing_ok=True)
        else:
            _make_private(path.parent)
            (data_dir / POINTER_NAME).write_text(f"{path}\n")
        if path.exists():
            if _somebody_listens(path):
                raise ConfigError(
                    f"data directory {data_dir}: a node runs on it already, choose another one"
                )
            path.unlink()
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.bind(str(path))
        path.chmod(0o600)  # before it listens, so nobody else was ever let in
        raw.listen(CLIENTS_MAX)
    except OSError as error:
        raise ConfigError(f"status socket {path}: {error.strerror}") from None
    return trio.SocketListener(trio.socket.from_stdlib_socket(raw))


def _make_private(folder: Path) -> None:
    """Make a directory in a shared place ours alone, or refuse one that somebody else made."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"directory {folder} is not private to you: remove it")


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True
        except OSError:
            return False
        return True


def fetch_status(data_dir: Path, *, timeout_s: float = 10.0) -> StatusSnapshot:
    """Ask the node that runs on a data directory. Blocking.

    Raises:
        ConfigError: no node runs there, or it is of a version that speaks otherwise.
        RequestTimeout: it runs but did not answer in time.
    """
    answer = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_s)
            client.connect(str(_pointed_path(data_dir)))
            while block := client.recv(65_536):
                answer += block
                if len(answer) > ANSWER_BYTES_MAX:
                    raise ConfigError(f"the node on {data_dir} answered with too much")
    except TimeoutError:
        raise RequestTimeout(f"the node on {data_dir} did not answer in {timeout_s:g} s") from None
    except OSError:
        raise ConfigError(
            f"no node is running on {data_dir}: start one with swarm-node join, or wait for one "
            "that starts to print its address"
        ) from None
    try:
        return _SNAPSHOT.validate_json(answer)
    except ValidationError:
        raise ConfigError(
            f"the node on {data_dir} answered what this version cannot read: "
            "is it busy, or of another version?"
        ) from None


def _pointed_path(data_dir: Path) -> Path:
    try:
        return Path((data_dir / POINTER_NAME).read_text().strip())
    except FileNotFoundError:
        return data_dir.absolute() / SOCKET_NAME


def render_status(snapshot: StatusSnapshot, *, private: bool = False) -> str:
    """The snapshot, `terminal_width()` wide; only links are wider, so that they can be copied.
    `private`: a link lets nobody join."""
    console = Console(width=terminal_width(), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(_view(snapshot))
    lines = [line.rstrip() for line in captured.get().rstrip().splitlines()]
    if private:
        lines += ["", "others join with what swarm-node invite prints"]
    elif snapshot.addresses:
        lines += ["", "others join with any one of these lines"]
        open_to = Invitation(snapshot.run_id, snapshot.addresses, model=snapshot.link_model)
        lines += [f"  swarm-node join {printable(link, 400)}" for link in open_to.links]
    return "\n".join(lines)


def _view(snapshot: StatusSnapshot) -> RenderableType:
    parts: list[RenderableType] = [
        Text(f"! {printable(note, 400)}", style="bold yellow") for note in snapshot.notes
    ]
    if parts:
        parts.append(Text())
    parts.append(figures.facts_table(_node_lines(snapshot), fold=True))
    if snapshot.rejected:
        ordered = sorted(snapshot.rejected.items(), key=lambda item: (-item[1], item[0]))
        rows = [(reason, str(count)) for reason, count in ordered]
        parts += [Text(), figures.rows_table(("rejected because", "records"), rows)]
    if snapshot.bans:
        parts += [Text(), _bans_table(snapshot.bans)]
    parts += [Text(), _peers_table(snapshot.peers)]
    return Group(*parts)


def _node_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    sizes = f"{amount(s.parameters)} parameters, " if s.parameters else ""  # a worker never knows
    precision = f" in {s.precision}" if s.precision else ""
    lines = [
        ("node", s.peer_id),
        ("run", f"{s.run_id}, up {duration(s.uptime_s)}, {s.agent}"),
        ("policy", f"{s.model}, {sizes}{s.engine} engine{precision}"),
        ("now", figures.now_line(s)),
        *figures.done_lines(s),
        *figures.pool_lines(s),
        *figures.credit_lines(s),
        *_connection_lines(s),
        ("traffic", f"{amount(s.bytes_in, 'B')} in, {amount(s.bytes_out, 'B')} out"),
    ]
    for protocol, (taken, given) in sorted(s.bytes_by_protocol.items()):
        name = printable(protocol, 48)
        lines.append(("", f"{name}: {amount(taken, 'B')} in, {amount(given, 'B')} out"))
    trainer = f", {amount(s.trainer_memory_bytes, 'B')} trainer" if s.role != "worker" else ""
    lines.append(("memory", f"{amount(s.memory_bytes, 'B')} node{trainer}"))
    return lines


def _connection_lines(s: StatusSnapshot) -> list[tuple[str, str]]:
    """Connection slots in use, and the origin that has most if they are scarce."""
    door = s.door
    if door is None:
        return []
    text = f"{door.connections} of {door.connections_max} places"
    if door.handshakes:
        text += f", {door.handshakes} of {door.handshakes_max} being admitted"
    if 2 * door.connections >= door.connections_max:
        text += f", {door.of_largest} of them {printable(door.largest_origin, 40)}"
    away = sum(door.turned_away.values())
    if away:
        most = max(door.turned_away, key=lambda why: (door.turned_away[why], why))
        text += f"; {away} newcomers refused, most as {printable(most, 40)}"
    return [("connections", text)]


def _bans_table(bans: tuple[BanStatus, ...]) -> Table:
    rows = [
        (
            ban.subject if ban.is_block else short_id(ban.subject),
            duration(ban.seconds_left),
            ban.why,
        )
        for ban in bans[-BANS_SHOWN_MAX:]
    ]
    columns = (f"banned ({len(bans)})", "for", figures.REASON)
    return figures.rows_table(columns, rows, max(0, len(bans) - BANS_SHOWN_MAX))


def _peers_table(peers: tuple[PeerStatus, ...]) -> RenderableType:
    if not peers:
        return Text("no peers connected", style="dim")
    rows = [
        # The address without the peer's id, which the first column shows
        (*figures.peer_cells(p), p.addresses[0].partition("/p2p/")[0] if p.addresses else p.agent)
        for p in peers[:PEERS_SHOWN_MAX]
    ]
    columns = (f"peer ({len(peers)})", *figures.PEER_COLUMNS, "at")
    return figures.rows_table(columns, rows, max(0, len(peers) - PEERS_SHOWN_MAX))
