"""A model hub that may not be there, found out before a library tries it for minutes."""

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError

ANSWERS_S: Final = 5.0  # for the hub's first answer; a look-up of its name alone may hang
OFFLINE_VARIABLE: Final = "HF_HUB_OFFLINE"  # for the libraries that read the cache, in children too


def use_cache_offline(model: str) -> str | None:
    """Have a model's cached copy read if the hub does not answer, and return a note about that.

    Raises:
        ConfigError: nor is there a copy.
    """
    from huggingface_hub import constants  # an optional dependency

    if Path(model).is_dir() or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        return None
    cache = Path(constants.HF_HUB_CACHE)
    copy = cache / f"models--{model.replace('/', '--')}"
    if not copy.is_dir():
        raise ConfigError(
            f"model {model}: no such directory, no copy in {cache}, and {constants.ENDPOINT} does "
            "not answer; name a directory, or set HF_HOME to a cache that holds it"
        )
    os.environ[OFFLINE_VARIABLE] = "1"
    return f"{constants.ENDPOINT} does not answer: model {model} comes from {copy}"


def _answers(endpoint: str) -> bool:
    """True if any answer comes in time, be it a refusal."""
    found: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=ANSWERS_S):
                found.append(True)
        except urllib.error.HTTPError:
            found.append(True)
        except (OSError, ValueError):
            found.append(False)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(ANSWERS_S)
    return found == [True]
