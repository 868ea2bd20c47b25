"""What is needed of reasoning-gym. The only file that imports `reasoning_gym`.

The library takes more than a second and 100 MB to import, so it is imported at the first problem,
which belongs into the verifier's process.
"""

import contextlib
import decimal
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

_PRECISION = 28  # decimal digits


def config_of(name: str, seed: int, settings: Mapping[str, Any]) -> Any:
    """The configuration of a dataset: these settings, and the dataset's defaults.

    Raises:
        AssertionError, TypeError, ValueError: the library refuses the settings.
    """
    from reasoning_gym.factory import DATASETS

    config = DATASETS[name][1](seed=seed, **settings)
    if hasattr(config, "validate"):
        config.validate()
    return config


def build(name: str, config: Any) -> Any:
    """The dataset of a configuration.

    Raises:
        As `config_of`.
    """
    from reasoning_gym.arithmetic import (
        basic_arithmetic,
    )
    from reasoning_gym.factory import DATASETS

    basic_arithmetic.find_common_divisors = common_divisors
    return DATASETS[name][0](config=config)


def common_divisors(one: int, other: int) -> list[int]:
    """What `basic_arithmetic` finds by trying every number up to a root, which takes hours for some
    of its dividends: the divisors that two numbers share, smallest and largest in turn."""
    from sympy import divisors

    common = math.gcd(one, other)
    below = [each for each in divisors(common) if each * each <= common] if common else []
    pairs = ((each, common // each) for each in below)
    return [each for low, high in pairs for each in ((low,) if low == high else (low, high))]


def groups() -> dict[str, str]:
    """The group of each dataset that there is, by its name."""
    import reasoning_gym  # noqa: F401 - registers them
    from reasoning_gym.factory import DATASETS

    return {name: made.__module__.split(".")[1] for name, (made, _) in DATASETS.items()}


def formula_names(dataset: Any, formula: str) -> set[str]:
    """The names in a formula of `propositional_logic`, as its parser reads them.

    Raises:
        ValueError: it is no formula.
    """
    from reasoning_gym.logic.propositional_logic import (
        Expression,
    )

    found: set[str] = dataset._collect_variables([Expression.from_string(formula)])
    return found


@contextlib.contextmanager
def quiet_and_exact() -> Iterator[None]:
    """One decimal context whatever ran before, and none of the library's progress dots."""
    precise = decimal.localcontext(decimal.Context(prec=_PRECISION))
    with precise, contextlib.redirect_stdout(io.StringIO()):
        yield
