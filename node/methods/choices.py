"""The methods that settings can name, without their functions' heavy imports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Final, cast

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from node.methods import advantages as formulas
from node.methods.filters import ByNeed
from node.methods.generation import Speculative
from node.methods.groups import Advantages
from node.methods.hints import Hints
from node.methods.loss_settings import CORRECTIONS, LOSSES, Dpo, LossSettings
from node.methods.method import MethodSettings
from node.methods.replay import Rescue
from node.methods.task_control import AdaptiveExternal, Vade
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
        raise ValueError(f"{name}: {first['loc'][0]}: {first['msg']}") from None


def chosen_loss(value: Any) -> LossSettings:
    return cast("LossSettings", chosen(LOSSES, value))


chosen_advantage = partial(chosen, {name: kind for name, (kind, _) in ADVANTAGES.items()})
chosen_correction = partial(chosen, CORRECTIONS)
chosen_preference = partial(chosen, {"dpo": Dpo})
chosen_control = partial(chosen, {"vade": Vade})
chosen_draw = partial(chosen, {"need": ByNeed})
chosen_external = partial(chosen, {"adaptive_external": AdaptiveExternal})
chosen_replay = partial(chosen, {"rescue": Rescue})
chosen_generate = partial(chosen, {"speculative": Speculative, "hints": Hints})

AS_TEXT: Final = PlainSerializer(str)

# The types of the settings by which a user names a method.
Advantage = Annotated[MethodSettings, BeforeValidator(chosen_advantage), AS_TEXT]
Control = Annotated[Vade, BeforeValidator(chosen_control), AS_TEXT]
Draw = Annotated[ByNeed, BeforeValidator(chosen_draw), AS_TEXT]
ExternalRule = Annotated[AdaptiveExternal, BeforeValidator(chosen_external), AS_TEXT]
Replay = Annotated[Rescue, BeforeValidator(chosen_replay), AS_TEXT]
Generate = Annotated[Speculative | Hints, BeforeValidator(chosen_generate), AS_TEXT]
Loss = Annotated[LossSettings, BeforeValidator(chosen_loss), AS_TEXT]
Preference = Annotated[Dpo, BeforeValidator(chosen_preference), AS_TEXT]
Correction = Annotated[MethodSettings, BeforeValidator(chosen_correction), AS_TEXT]
