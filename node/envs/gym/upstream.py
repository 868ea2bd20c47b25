"""The adapter of reasoning-gym, which takes a second and 100 MB to import: at the first problem, in
the verifier's process. The only file that imports `reasoning_gym`."""

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
_SOLVER = "pycosat"  # has no wheels, so it is missing where there is no compiler


def library() -> Any:
    """The table of datasets; without the solver that the library imports if that is missing."""
    try:
        importlib.import_module(_SOLVER)
    except ImportError:
        sys.modules[_SOLVER] = ModuleType(_SOLVER)
    with warnings.catch_warnings():  # about the syntax of its packages
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym  # noqa: F401 - registers them
        from reasoning_gym.factory import DATASETS

    return DATASETS


def config_of(name: str, seed: int, settings: Mapping[str, Any]) -> Any:
    """The configuration of a dataset: these settings, else its defaults.

    Raises:
        AssertionError, TypeError, ValueError: the library refuses the settings.
    """
    config = library()[name][1](seed=seed, **settings)
    if hasattr(config, "validate"):
        config.validate()
    return config


def build(name: str, config: Any) -> Any:
    """The dataset of a configuration. Raises as `config_of`."""
    datasets = library()
    from reasoning_gym.arithmetic import basic_arithmetic

    if name == "zebra_puzzles" and not hasattr(sys.modules[_SOLVER], "itersolve"):
        raise ValueError(
            f"it needs the package {_SOLVER}, which is compiled where it is installed: with a "
            f"compiler at hand add it by pip install {_SOLVER}==0.6.6"
        )
    basic_arithmetic.find_common_divisors = common_divisors
    return datasets[name][0](config=config)


def common_divisors(one: int, other: int) -> list[int]:
    """The divisors that two numbers share, smallest and largest in turn. Replaces a search of
    `basic_arithmetic` that takes hours for some dividends."""
    from sympy import divisors

    common = math.gcd(one, other)
    below = [each for each in divisors(common) if each * each <= common] if common else []
    pairs = ((each, common // each) for each in below)
    return [each for low, high in pairs for each in ((low,) if low == high else (low, high))]


def formula_names(dataset: Any, formula: str) -> set[str]:
    """The names in a formula of `propositional_logic`; ValueError if it is none."""
    from reasoning_gym.logic.propositional_logic import Expression

    found: set[str] = dataset._collect_variables([Expression.from_string(formula)])
    return found


@contextlib.contextmanager
def quiet_and_exact() -> Iterator[None]:
    """One decimal context, since making a problem changes the thread's, and no progress dots."""
    precise = decimal.localcontext(decimal.Context(prec=_PRECISION))
    with precise, contextlib.redirect_stdout(io.StringIO()):
        yield
