"""What the siege attacks, by the names that attacks have for it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from siege_target import Target, node_target

JOIN = ("join", "--local", "4", "--external", "2", "--group-size", "4", "--evaluate-every", "0")


@asynccontextmanager
async def node(data_dir: Path, host: str) -> AsyncIterator[Target]:
    """A node of the packaged demo run."""
    flags = [*JOIN, "--run", "demo", "--model", "tiny"]
    async with node_target("node", data_dir, host, flags) as target:
        target.extra["has_status"] = True
        yield target


TARGETS: dict[str, Callable[[Path, str], AbstractAsyncContextManager[Target]]] = {"node": node}


def opened(kind: str, data_dir: Path, host: str) -> AbstractAsyncContextManager[Target]:
    """A target of a kind."""
    return TARGETS[kind](data_dir, host)
