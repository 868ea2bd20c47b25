"""The methods that settings can name, without their functions' heavy imports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Final, cast

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from node.methods import admission_control as admitting
from node.methods import advantages as formulas
from node.methods import filters, generation, hints, replay, rewards
from node.methods import rollout_budgets as budgets
from node.methods import task_control as tasks
from node.methods.groups import Advantages
from node.methods.loss_settings import CORRECTIONS, LOSSES, Dpo, LossSettings
from node.methods.method import Family, MethodSettings
from node.methods.own import is_own, own_settings, told
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
    if set_to.own is None:
        return ADVANTAGES[set_to.kind][1](groups, set_to)
    with told(set_to):
        found: Advantages = set_to.own(groups, set_to)
    return found


def chosen(
    known: Mapping[str, type[MethodSettings]], value: Any, family: Family | None = None
) -> Any:
    """The settings of one of the `known` methods, from text (`gapo` or `gapo, window_share=0.4`) or
    from a table that has its name as `kind`. Other values come back as they are. With a `family`,
    the name may be of a user's own method, whose code then runs.

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
    name = str(given.pop("kind", ""))
    settings = known.get(name) or _settings_of(known, name, family)
    names = [each.name for each in fields(settings)]
    for key in given:
        if key not in names:
            takes = f"it takes {', '.join(names)}" if names else "it takes nothing"
            raise ValueError(f"{name} takes no {key or 'nameless setting'}; {takes}")
    try:
        return TypeAdapter(settings).validate_python(given)
    except ValidationError as error:
        (first, *_) = error.errors()
        where = "".join(f"{part}: " for part in first["loc"][:1])
        raise ValueError(f"{name}: {where}{first['msg']}") from None


def _settings_of(
    known: Mapping[str, type[MethodSettings]], name: str, family: Family | None
) -> type[MethodSettings]:
    """The settings of an own method, or of the one that is known by this other name."""
    if is_own(name):
        if family is None:
            raise ValueError(
                f"{name}: only a node's own flags and environment name a file or a plug-in; "
                "others' code is not run"
            )
        return own_settings(name, family)
    from node.methods.registry import named  # it brings torch in

    found = [each.name for each in named(name) if known.get(each.name) is each.parameters]
    if not found:
        trl = "; TRL's sapo is soft_gate" if "soft_gate" in known else ""
        raise ValueError(f"no such method; take one of {', '.join(known)}{trl}")
    if len(found) > 1:
        raise ValueError(f"{name} is a name of several; take one of {', '.join(found)}")
    return known[found[0]]


def chosen_chain(
    known: Mapping[str, type[MethodSettings]], value: Any, family: Family | None = None
) -> Any:
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
    found = tuple(chosen(known, each, family) for each in value)
    kinds = [each.kind for each in found if isinstance(each, MethodSettings)]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise ValueError(f"{twice} is named twice")
    return found


def as_text(value: Any) -> str:
    """Methods as a user types them."""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def chosen_loss(value: Any) -> LossSettings:
    return cast("LossSettings", chosen(LOSSES, value, "loss"))


def by_name(*kinds: type[MethodSettings]) -> dict[str, type[MethodSettings]]:
    return {each.kind: each for each in kinds}


KNOWN: Final[Mapping[Family, Mapping[str, type[MethodSettings]]]] = {
    "control": by_name(
        tasks.Cdas,
        tasks.Vade,
        budgets.VarianceCurriculum,
        budgets.LengthSchedule,
        budgets.Dars,
        budgets.Brorl,
        budgets.XrpoAllocation,
        budgets.Duet,
        admitting.Admission,
        admitting.Reclamation,
    ),
    "generate": by_name(
        generation.Speculative,
        generation.WeightNoise,
        generation.Pruning,
        generation.Branching,
        generation.Purify,
        hints.Hints,
        hints.Nudges,
    ),
    "draw": by_name(filters.ByNeed),
    "external_rule": by_name(tasks.AdaptiveExternal),
    "reward": by_name(
        rewards.Majority,
        rewards.Distribution,
        rewards.Flawed,
    ),
    "replay": by_name(
        replay.PoolOfSuccesses,
        replay.ReplayedSuccesses,
        replay.Rescue,
        replay.Distil,
        replay.Salvage,
        replay.Teacher,
    ),
    "filter": by_name(
        filters.ZeroAdvantage,
        filters.DynamicSampling,
        filters.Overlong,
        filters.Variance,
        filters.Extremes,
    ),
    "advantage": {
        **{name: kind for name, (kind, _) in ADVANTAGES.items()},
        **by_name(
            formulas.Hacpo,
            formulas.TwoLevels,
            formulas.SubProblems,
            rewards.CrossValue,
        ),
    },
    "loss": LOSSES,
    "correction": CORRECTIONS,
    "preference": by_name(Dpo),
}
"""All methods, by the setting that names them."""

chosen_correction = partial(chosen, CORRECTIONS, family="correction")
chosen_preference = partial(chosen, KNOWN["preference"], family="preference")
AS_TEXT: Final = PlainSerializer(as_text)


def _one(family: Family) -> BeforeValidator:
    return BeforeValidator(partial(chosen, KNOWN[family], family=family))


def _chain(family: Family) -> BeforeValidator:
    return BeforeValidator(partial(chosen_chain, KNOWN[family], family=family))


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
RunLoss = Annotated[LossSettings, BeforeValidator(partial(chosen, LOSSES)), AS_TEXT]
Correction = Annotated[MethodSettings, _one("correction"), AS_TEXT]
Preference = Annotated[MethodSettings, _one("preference"), AS_TEXT]
