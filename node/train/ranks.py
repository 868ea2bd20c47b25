"""This process's place among those that torchrun started. Free of torch. Rank 0 is the node."""

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.errors import ConfigError

RANKS_MAX = 1024  # processes that train one policy
ATTEMPTS_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train one policy together."""

    rank: int
    size: int  # of them all, at least two
    local_rank: int  # among those of this machine; also the number of its GPU
    local_size: int
    attempt: int = 0  # how often torchrun has started them again; its store lasts through that

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Ranks | None":
        """From the variables that torchrun sets; None: this process trains alone.

        Raises:
            ConfigError: some of the variables are missing, or make no sense.
        """
        if _number(environment, "WORLD_SIZE", 1, RANKS_MAX, default=1) == 1:
            return None
        size = _number(environment, "WORLD_SIZE", 2, RANKS_MAX)
        rank = _number(environment, "RANK", 0, size - 1)
        local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size, default=size)
        local_rank = _number(environment, "LOCAL_RANK", 0, local_size - 1, default=rank)
        if not environment.get("MASTER_ADDR"):
            raise ConfigError("MASTER_ADDR is not set: torchrun says where its ranks meet")
        _number(environment, "MASTER_PORT", 1, 65_535)
        attempt = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0, ATTEMPTS_MAX, default=0)
        return cls(rank, size, local_rank, local_size, attempt)


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int, default: int | None = None
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ConfigError(f"{name} is not set: start all ranks with torchrun")
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ConfigError(f"{name} = {text!r}: torchrun sets a number from {least} to {most}")
    return int(text)
