"""The ranges of settings, and the errors for wrong ones."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from swarm.errors import ConfigError

VALUE_MIN, VALUE_MAX = 1e-12, 1e18  # of any input: quotients of these stay finite
MBIT = 1e6 / 8  # bytes a second

_IN_MBIT = AfterValidator(lambda mbit_per_s: mbit_per_s * MBIT)  # as files give a link
Uplink = Annotated[float, Field(alias="up_mbit_per_s", gt=0, le=1e9), _IN_MBIT]
Downlink = Annotated[float, Field(alias="down_mbit_per_s", gt=0, le=1e9), _IN_MBIT]


class WrongSetting(ConfigError, ValueError):
    """A setting is out of its range. A ValueError too: so pydantic adds where in a file it is."""


def require_above_0(owner: object, *names: str) -> None:
    """
    Raises:
        WrongSetting: a field is neither None nor a number above 0.
    """
    for name in names:
        value = getattr(owner, name)
        if value is not None and not VALUE_MIN <= value <= VALUE_MAX:
            raise WrongSetting(
                f"{name} = {value}: must be a number above 0 (up to {VALUE_MAX:.0e})"
            )


def require_not_negative(owner: object, *names: str) -> None:
    """
    Raises:
        WrongSetting: a field is no number from 0 up.
    """
    for name in names:
        value = getattr(owner, name)
        if not 0.0 <= value <= VALUE_MAX:
            raise WrongSetting(f"{name} = {value}: must be a number from 0 up (to {VALUE_MAX:.0e})")


def require_unlike(names: Sequence[str]) -> None:
    """
    Raises:
        WrongSetting: two workers have one name.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise WrongSetting(f"name = {name}: two workers have it")
        seen.add(name)
