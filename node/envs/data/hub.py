"""Data sets of the Hugging Face hub by id, as the Parquet files that the hub makes of each. The
only file here that imports `huggingface_hub`, and only where an id is given."""

import queue
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from node.system.extras import extra_line
from swarm.errors import ConfigError
from swarm.texts import printable

REVISION: Final = "refs/convert/parquet"
CACHE: Path | None = None  # None: where the hub's library keeps its files
ENDPOINT: str | None = None  # None: where that library looks
ANSWER_S: Final = 9.0  # of the hub, until it counts as out of reach
PARTS_SHOWN: Final = 12
ERROR_CHARS_MAX: Final = 160
_ID: Final = re.compile(r"\w[\w.-]*/[\w.-]+(?:/[\w.-]+){0,2}", re.ASCII)


def is_id(text: str) -> bool:
    """True for OWNER/NAME, perhaps with a configuration and a split after it."""
    return _ID.fullmatch(text) is not None and ".." not in text


def fetched(text: str) -> Path:
    """The folder with the rows of a data set on the hub, or in its cache if the hub is out of
    reach.

    Raises:
        ConfigError: neither has it, or it has several configurations or splits and none is named.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # made at first use
    except ImportError:
        raise ConfigError(
            f"{text}: no such file; a data set of the hub takes more: {extra_line('torch')}"
        ) from None
    owner, name, *wanted = text.split("/")
    what: dict[str, Any] = {"repo_id": f"{owner}/{name}", "repo_type": "dataset"}
    what |= {"revision": REVISION, "cache_dir": CACHE, "endpoint": ENDPOINT}
    try:
        api = HfApi(ENDPOINT)
        told = _in_time(lambda: api.dataset_info(what["repo_id"], revision=REVISION))
        files = [each.rfilename for each in told.siblings or ()]
        part = _part(text, files, wanted)
        root = snapshot_download(**what, allow_patterns=[f"{part}/*.parquet"])
        return Path(root) / part
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        why = printable(first, ERROR_CHARS_MAX)
    try:
        named = f"*{'/'.join(wanted)}*"
        root = snapshot_download(**what, local_files_only=True, allow_patterns=[named])
    except OSError:
        raise ConfigError(
            f"{text}: no such file, and no data set of the hub or its cache ({why}); connect to "
            "the internet, or name a file"
        ) from None
    files = [str(each.relative_to(root).as_posix()) for each in Path(root).rglob("*.parquet")]
    return Path(root) / _part(text, files, wanted)


def _part(text: str, files: Sequence[str], wanted: Sequence[str]) -> str:
    """The folder of the configuration and split that are wanted, or of the only ones."""
    folders = sorted(
        {str(PurePosixPath(each).parent) for each in files if each.endswith(".parquet")}
    )
    fitting = [each for each in folders if _fits(each.split("/"), list(wanted))]
    if len(fitting) == 1:
        return fitting[0]
    repository = "/".join(text.split("/")[:2])
    shown = ", ".join(folders[:PARTS_SHOWN]) or "no rows"
    raise ConfigError(
        f"{text}: it holds {shown}; name one, as in {repository}/{folders[0] if folders else 'x'}"
    )


def _fits(parts: list[str], wanted: list[str]) -> bool:
    return parts[: len(wanted)] == wanted or parts[len(parts) - len(wanted) :] == wanted


def _in_time(call: Callable[[], Any]) -> Any:
    """The result of a call; TimeoutError if it takes too long, as look-ups of names may."""
    found: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            found.put((call(), None))
        except Exception as error:  # noqa: BLE001 - raised below
            found.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = found.get(timeout=ANSWER_S)
    except queue.Empty:
        raise TimeoutError(f"no answer within {ANSWER_S:.0f} s") from None
    if error is not None:
        raise error
    return result
