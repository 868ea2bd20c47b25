"""The methods that settings can name, without their functions' heavy imports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Final, cast

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from node.methods import advantages as formulas
from node.methods.filters import (
    ByNeed,
    DynamicSampling,
    Extremes,
    Overlong,
    Variance,
    ZeroAdvantage,
)
from node.methods.generation import Speculative
from node.methods.groups import Advantages
from node.methods.hints import Hints
from node.methods.loss_settings import CORRECTIONS, LOSSES, Dpo, LossSettings
from node.methods.method import Family, MethodSettings
from node.methods.replay import (
    Distil,
    PoolOfSuccesses,
    ReplayedSuccesses,
    Rescue,
    Salvage,
    Teacher,
)
from node.methods.rewards import CrossValue, Distribution, Flawed, Majority
from node.methods.rollout_budgets import (
    Brorl,
    Dars,
    Duet,
    LengthSchedule,
    VarianceCurriculum,
    XrpoAllocation,
)
from node.methods.task_control import AdaptiveExternal, Cdas, Vade
from swarm.rollouts import ScoredGroup

_Function = Callable[[Sequence[ScoredGroup], Any], Advantages]

ADVANTAGES: Final[Mapping[str, tuple[type[MethodSettings], _Function]]] = {
    "grpo": (formulas.Grpo, formulas.grpo),
    "dr_grpo": (formulas.DrGrpo, formulas.dr_grpo),
    "rloo": (formulas.Rloo, formulas.rloo),
    "reinforce_pp": (formulas.ReinforcePlusPlus, formulas.reinforce_pp),
    "opo": (formulas.Opo, formulas.opo),
    "pass_k": (formulas.PassK, formulas.pass_k),
    "mc_grpo": (formulas.McGrpo, formulas.mc_grpo),
    "gapo": (formulas.Gapo, formulas.gapo),
    "contexts": (formulas.Contexts, formulas.contexts),
    "novelty": (formulas.Novelty, formulas.novelty),
    "uniqueness": (formulas.Uniqueness, formulas.uniqueness),
}


def advantages(groups: Sequence[ScoredGroup], set_to: MethodSettings) -> Advantages:
    """The advantages of a batch by the method that `set_to` belongs to."""
    return ADVANTAGES[set_to.kind][1](groups, set_to)


def chosen(known: Mapping[str, type[MethodSettings]], value: Any) -> Any:
    """The settings of one of the `known` methods, from text (`gapo` or `gapo, window_share=0.4`) or
    from a table that has its name as `kind`. Other values come back as they are.

    Raises:
        ValueError: no such method, or no such setting of it.
    """
    if isinstance(value, str):
        name, *parts = (part.strip() for part in value.split(","))
        pairs = [part.partition("=") for part in parts]
        value = {"kind": name, **{key.strip(): text.strip() for key, _, text in pairs}}
    if not isinstance(value, Mapping):
        return value
    given = dict(value)
    name = given.pop("kind", None)
    if name not in known:
        raise ValueError(f"no such method; take one of {', '.join(known)}")
    names = [each.name for each in fields(known[name])]
    for key in given:
        if key not in names:
            takes = f"it takes {', '.join(names)}" if names else "it takes nothing"
            raise ValueError(f"{name} takes no {key or 'nameless setting'}; {takes}")
    try:
        return TypeAdapter(known[name]).validate_python(given)
    except ValidationError as error:
        (first, *_) = error.errors()
        where = "".join(f"{part}: " for part in first["loc"][:1])
        raise ValueError(f"{name}: {where}{first['msg']}") from None


def chosen_chain(known: Mapping[str, type[MethodSettings]], value: Any) -> Any:
    """The settings of several methods, from text (`overlong, buffer=64, extremes`), or from a table
    or a list of texts and tables. Errors as `chosen`."""
    if isinstance(value, str):
        methods: list[str] = []
        for part in value.split(","):
            if methods and "=" in part:
                methods[-1] += f",{part}"
            else:
                methods.append(part)
        value = methods
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        return value
    found = tuple(chosen(known, each) for each in value)
    kinds = [each.kind for each in found if isinstance(each, MethodSettings)]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise ValueError(f"{twice} is named twice")
    return found


def as_text(value: Any) -> str:
    """Methods as a user types them."""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def chosen_loss(value: Any) -> LossSettings:
    return cast("LossSettings", chosen(LOSSES, value))


def by_name(*kinds: type[MethodSettings]) -> dict[str, type[MethodSettings]]:
    return {each.kind: each for each in kinds}


KNOWN: Final[Mapping[Family, Mapping[str, type[MethodSettings]]]] = {
    "control": by_name(
        *(Cdas, Vade, VarianceCurriculum, LengthSchedule),
        *(Dars, Brorl, XrpoAllocation, Duet),
    ),
    "generate": by_name(Speculative, Hints),
    "draw": by_name(ByNeed),
    "external_rule": by_name(AdaptiveExternal),
    "reward": by_name(Majority, Distribution, Flawed),
    "replay": by_name(PoolOfSuccesses, ReplayedSuccesses, Rescue, Distil, Salvage, Teacher),
    "filter": by_name(ZeroAdvantage, DynamicSampling, Overlong, Variance, Extremes),
    "advantage": {
        **{name: kind for name, (kind, _) in ADVANTAGES.items()},
        **by_name(formulas.Hacpo, formulas.TwoLevels, formulas.SubProblems, CrossValue),
    },
    "loss": LOSSES,
    "correction": CORRECTIONS,
    "preference": by_name(Dpo),
}
"""All methods, by the setting that names them."""

CHAINS: Final[tuple[Family, ...]] = ("control", "generate", "reward", "replay", "filter")
"""Families of which a node may use several methods, one after the other."""

chosen_correction = partial(chosen, CORRECTIONS)
chosen_preference = partial(chosen, KNOWN["preference"])
AS_TEXT: Final = PlainSerializer(as_text)


def _one(family: Family) -> BeforeValidator:
    return BeforeValidator(partial(chosen, KNOWN[family]))


def _chain(family: Family) -> BeforeValidator:
    return BeforeValidator(partial(chosen_chain, KNOWN[family]))


# The types of the settings by which a user names methods.
Methods = tuple[MethodSettings, ...]
Control = Annotated[Methods, _chain("control"), AS_TEXT]
Generate = Annotated[Methods, _chain("generate"), AS_TEXT]
Reward = Annotated[Methods, _chain("reward"), AS_TEXT]
Replay = Annotated[Methods, _chain("replay"), AS_TEXT]
Filter = Annotated[Methods, _chain("filter"), AS_TEXT]
Draw = Annotated[MethodSettings, _one("draw"), AS_TEXT]
ExternalRule = Annotated[MethodSettings, _one("external_rule"), AS_TEXT]
Advantage = Annotated[MethodSettings, _one("advantage"), AS_TEXT]
Loss = Annotated[LossSettings, _one("loss"), AS_TEXT]
Correction = Annotated[MethodSettings, _one("correction"), AS_TEXT]
Preference = Annotated[MethodSettings, _one("preference"), AS_TEXT]
