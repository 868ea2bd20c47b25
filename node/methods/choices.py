"""The methods that settings can name, without their functions' heavy imports."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, cast

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from node.methods import advantages as contexts
from node.methods import advantages as group
from node.methods import advantages as robust
from node.methods import advantages as unlikely
from node.methods import generation as speculative
from node.methods import hints
from node.methods import loss_settings as losses
from node.methods import loss_settings as weighing
from node.methods import task_control as external
from node.methods import task_control as vade
from node.methods.filters import ByNeed
from node.methods.groups import Advantages
from node.methods.loss_settings import CORRECTIONS, LOSSES, LossSettings
from node.methods.method import MethodSettings
from node.methods.replay import Rescue
from swarm.rollouts import ScoredGroup

_Function = Callable[[Sequence[ScoredGroup], Any], Advantages]

ADVANTAGES: Final[Mapping[str, tuple[type[MethodSettings], _Function]]] = {
    "grpo": (group.Grpo, group.grpo),
    "dr_grpo": (group.DrGrpo, group.dr_grpo),
    "rloo": (group.Rloo, group.rloo),
    "reinforce_pp": (group.ReinforcePlusPlus, group.reinforce_pp),
    "opo": (group.Opo, group.opo),
    "pass_k": (group.PassK, group.pass_k),
    "mc_grpo": (robust.McGrpo, robust.mc_grpo),
    "gapo": (robust.Gapo, robust.gapo),
    "contexts": (contexts.Contexts, contexts.contexts),
    "novelty": (unlikely.Novelty, unlikely.novelty),
    "uniqueness": (unlikely.Uniqueness, unlikely.uniqueness),
}


def advantages(groups: Sequence[ScoredGroup], set_to: MethodSettings) -> Advantages:
    """The advantages of a batch by the method that `set_to` belongs to.

    Raises:
        ValueError: as the method does.
    """
    return ADVANTAGES[set_to.kind][1](groups, set_to)


def chosen(known: Mapping[str, type[MethodSettings]], value: Any) -> Any:
    """A method of those `known`, and what it is set to; as text `gapo` or `gapo, window_share=0.4`,
    or a table with its name as `kind`. What is none of these comes back as it is.

    Raises:
        ValueError: there is no such method, or it takes no such thing.
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
    return _checked(str(name), known[name], given)


def _checked(
    name: str, parameters: type[MethodSettings], given: Mapping[str, Any]
) -> MethodSettings:
    fields = [each for each in parameters.__dataclass_fields__ if each != "kind"]
    for key in given:
        if key not in fields:
            known = f"it takes {', '.join(fields)}" if fields else "it takes nothing"
            raise ValueError(f"{name} takes no {key or 'nameless setting'}; {known}")
    try:
        return TypeAdapter(parameters).validate_python(given)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise ValueError(f"{name}: {first['loc'][0]}: {first['msg']}") from None


chosen_advantage = partial(chosen, {name: kind for name, (kind, _) in ADVANTAGES.items()})


chosen_correction = partial(chosen, CORRECTIONS)


chosen_control = partial(chosen, {"vade": vade.Vade})


chosen_draw = partial(chosen, {"need": ByNeed})


chosen_external = partial(chosen, {"adaptive_external": external.AdaptiveExternal})


chosen_replay = partial(chosen, {"rescue": Rescue})


chosen_generate = partial(chosen, {"speculative": speculative.Speculative, "hints": hints.Hints})


def chosen_loss(value: Any) -> LossSettings:
    return cast("LossSettings", chosen(LOSSES, value))


Advantage = Annotated[
    group.Grpo
    | group.DrGrpo
    | group.Rloo
    | group.ReinforcePlusPlus
    | group.Opo
    | group.PassK
    | robust.McGrpo
    | robust.Gapo
    | contexts.Contexts
    | unlikely.Novelty
    | unlikely.Uniqueness,
    BeforeValidator(chosen_advantage),
]
"""Those that the loops take."""

Control = Annotated[vade.Vade, BeforeValidator(chosen_control)]
"""Those that choose a node's tasks."""

Draw = Annotated[ByNeed, BeforeValidator(chosen_draw)]
"""Those by which a node draws others' groups."""

ExternalRule = Annotated[external.AdaptiveExternal, BeforeValidator(chosen_external)]
"""Those by which a node decides how many of others' groups it draws."""

Replay = Annotated[Rescue, BeforeValidator(chosen_replay)]
"""Those by which a node's own groups take completions of others."""

Generate = Annotated[speculative.Speculative | hints.Hints, BeforeValidator(chosen_generate)]
"""Those by which a node's own completions begin."""

Loss = Annotated[
    losses.SapoLoss
    | losses.GrpoLoss
    | losses.DapoLoss
    | losses.DecoupledLoss
    | losses.TisLoss
    | losses.M2poLoss
    | losses.GspoLoss
    | losses.GepoLoss
    | losses.CispoLoss
    | losses.SoftGateLoss
    | losses.ToprLoss
    | losses.BapoLoss,
    BeforeValidator(chosen_loss),
]
"""Those that a trainer has."""

Correction = Annotated[
    weighing.Truncated
    | weighing.IcePop
    | weighing.Masked
    | weighing.Veto
    | weighing.Geometric
    | weighing.K3
    | weighing.Opsm,
    BeforeValidator(chosen_correction),
]
"""Those that the loss `sapo` takes; others correct by themselves."""
