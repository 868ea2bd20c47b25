"""The adapter of reasoning-gym. The only file that imports `reasoning_gym`.

The library takes more than a second and 100 MB to import, so it is imported at the first problem,
which belongs into the verifier's process.
"""

import contextlib
import decimal
import importlib
import io
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

_PRECISION = 28  # decimal digits
_SOLVER = "pycosat"  # has no wheels: an environment without a compiler lacks it
_SOLVED = ("zebra_puzzles",)  # what it is needed for


def _library() -> Any:
    """The table of datasets, with or without the solver that the library imports at its start.
    Some of its packages have sloppy syntax, of which Python warns when it compiles them."""
    try:
        importlib.import_module(_SOLVER)
    except ImportError:
        sys.modules[_SOLVER] = ModuleType(_SOLVER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym  # noqa: F401 - registers them
        from reasoning_gym.factory import DATASETS

    return DATASETS


def _check_solver(name: str) -> None:
    if name in _SOLVED and not hasattr(sys.modules[_SOLVER], "itersolve"):
        raise ValueError(
            f"it needs the package {_SOLVER}, which is compiled where it is installed: with a "
            f"compiler at hand add it by pip install {_SOLVER}==0.6.6"
        )


def config_of(name: str, seed: int, settings: Mapping[str, Any]) -> Any:
    """The configuration of a dataset: these settings, and the dataset's defaults.

    Raises:
        AssertionError, TypeError, ValueError: the library refuses the settings.
    """
    config = _library()[name][1](seed=seed, **settings)
    if hasattr(config, "validate"):
        config.validate()
    return config


def build(name: str, config: Any) -> Any:
    """The dataset of a configuration.

    Raises:
        As `config_of`; ValueError: the dataset needs what is not installed.
    """
    datasets = _library()
    from reasoning_gym.arithmetic import basic_arithmetic

    _check_solver(name)
    basic_arithmetic.find_common_divisors = common_divisors
    return datasets[name][0](config=config)


def common_divisors(one: int, other: int) -> list[int]:
    """Replaces a search of `basic_arithmetic` that takes hours for some of its dividends: the
    divisors that two numbers share, smallest and largest in turn."""
    from sympy import divisors

    common = math.gcd(one, other)
    below = [each for each in divisors(common) if each * each <= common] if common else []
    pairs = ((each, common // each) for each in below)
    return [each for low, high in pairs for each in ((low,) if low == high else (low, high))]


def groups() -> dict[str, str]:
    """The group of each dataset that there is, by its name."""
    return {name: made.__module__.split(".")[1] for name, (made, _) in _library().items()}


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
