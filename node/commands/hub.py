"""A model directory on its way to a model hub. Only what the user names goes there."""

import re
from collections.abc import Callable
from pathlib import Path

from swarm.errors import ChildFailed, ConfigError
from swarm.texts import printable

ERROR_CHARS_MAX = 200
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def check_repository(name: str) -> None:
    """
    Raises:
        ConfigError: this is no name of a repository.
    """
    if not _REPOSITORY.fullmatch(name):
        raise ConfigError(f"--push {name}: no repository's name; write OWNER/NAME")


def push(directory: Path, repository: str, message: str, say: Callable[[str], None]) -> None:
    """Upload a model directory; the repository is made, as a private one, where it is not there.
    Who uploads is told by the hub's own means: `HF_TOKEN`, or what `hf auth login` left.

    Raises:
        ChildFailed: the hub did not take it; the directory is as it was.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # made at first use

    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        done = hub.upload_folder(repo_id=repository, folder_path=directory, commit_message=message)
    except (httpx.HTTPError, HFValidationError, OSError) as error:
        lines = str(error).split("\n") or [type(error).__name__]
        said = printable(lines[0], ERROR_CHARS_MAX)
        raise ChildFailed(
            f"{repository}: not uploaded ({said}); the model is in {directory}"
        ) from error
    say(f"{repository}: uploaded, {done.commit_url}")
