"""`swarm-coordinator plan`: the planned workers, and why. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from coordinator.model.activation import Choice, cheapest_set
from coordinator.model.capacity import (
    SECONDS_PER_H,
    STALENESS_MAX,
    WORKERS_MAX,
    Capacity,
    Form,
    Infeasible,
    Run,
    Worker,
    assess,
    default_period,
    worker_cost_per_s,
)
from coordinator.plan_file import PlanFile

PER_GROUPS = 1000  # unit of the workers' prices
MORE_MAX = 64  # workers that are tried for an infeasible plan
KINDS_MAX = 8  # of workers
SMALLER_MAX = 256  # groups fewer in a step


def make_report(file: PlanFile) -> dict[str, Any]:
    """All that `plan --json` prints. `chosen` is for overlapped workers, as nodes are. `forms` has
    each form with the default period, and with the best where that differs. `price_of_groups`:
    dollars for `PER_GROUPS` admissible groups, egress included."""
    run, workers, margin = file.run, file.workers, file.settings.margin
    chosen = cheapest_set(run, workers, Form.OVERLAPPED, margin)
    forms: list[dict[str, Any]] = []
    default = default_period(run)
    for form in Form:
        found = chosen if form is Form.OVERLAPPED else cheapest_set(run, workers, form, margin)
        members = workers if isinstance(found, Infeasible) else _members(workers, found.names)
        best = assess(run, members, form)
        best_period = 0 if isinstance(best, Infeasible) else best.period_steps
        tried = [(default, True, assess(run, members, form, default))]
        if best_period != default or isinstance(best, Infeasible):
            tried.append((best_period, False, best))
        forms += [
            {
                "form": form,
                "period_steps": period_steps,
                "is_default": is_default,
                "workers": len(members),
                **_found_json(each),
            }
            for period_steps, is_default, each in tried
        ]
    choice: dict[str, Any] = {}
    if isinstance(chosen, Choice):
        choice = {"names": list(chosen.names), "cost_per_h": chosen.cost_per_h}
    return {
        "run": asdict(run),
        "margin": margin,
        "feasible": bool(choice),
        "chosen": choice | _found_json(chosen.capacity if isinstance(chosen, Choice) else chosen),
        "forms": forms,
        "workers": [_worker_row(run, workers, each, chosen) for each in workers],
        "notes": [
            *_notes(run, forms, is_feasible=bool(choice)),
            *([] if choice else _would_suffice(run, workers, margin)),
        ],
    }


def _would_suffice(run: Run, workers: Sequence[Worker], margin: float) -> Iterable[str]:
    """A line for each single change that makes a plan feasible."""

    def suffices(run: Run, members: Sequence[Worker]) -> bool:
        found = assess(run, members, Form.OVERLAPPED)
        return isinstance(found, Capacity) and found.offered_per_s >= margin * found.required_per_s

    def needed(kind: Worker) -> int:
        """The number of further workers of a kind that suffices; 0: `MORE_MAX` do not."""
        more = [replace(kind, name=f"{kind.name} more {number}") for number in range(MORE_MAX)]
        room = range(1, min(MORE_MAX, WORKERS_MAX - len(workers)) + 1)
        return next((n for n in room if suffices(run, [*workers, *more[:n]])), 0)

    kinds = list({replace(each, name="kind"): each for each in workers}.values())[:KINDS_MAX]
    found = [(n * kind.price_per_h, n, kind.name) for kind in kinds if (n := needed(kind))]
    lines = [
        f"{n} more {'worker' if n == 1 else 'workers'} like {name} would suffice, for "
        f"${price:.2f} an hour more"
        for price, n, name in sorted(found)[:1]
    ]
    bounds = range(run.staleness_max + 1, STALENESS_MAX + 1)
    sizes = range(run.groups_per_step - 1, max(0, run.groups_per_step - SMALLER_MAX), -1)
    tried = {
        "S": ((n, replace(run, staleness_max=n)) for n in bounds),
        "groups_per_step": ((n, replace(run, groups_per_step=n)) for n in sizes),
    }
    for name, changed in tried.items():
        least = next((n for n, other in changed if workers and suffices(other, workers)), None)
        lines += [] if least is None else [f"{name} = {least} would suffice"]
    return lines or ["no single change of workers, S or groups_per_step suffices"]


def _notes(run: Run, forms: Sequence[Mapping[str, Any]], *, is_feasible: bool) -> Iterable[str]:
    default = default_period(run)
    best = {row["form"]: row["period_steps"] for row in forms if not row["is_default"]}
    for row in forms:
        if row["is_default"] and row.get("wastes"):
            use = f"; use κ = {best[row['form']]}" if best.get(row["form"]) else ""
            yield (
                f"{row['form']}: κ = S - 1 = {default} would waste samples, for some would be "
                f"{row['staleness_worst']} steps old and S = {run.staleness_max}{use}"
            )
    if default < 1:
        yield f"S = {run.staleness_max} has no κ = S - 1; κ is at least 1"
    if is_feasible:
        yield (
            "more workers would not make a step shorter: the learner is the limit at "
            f"{run.train_s:g} s a step"
        )


def _members(workers: Iterable[Worker], names: Iterable[str]) -> list[Worker]:
    named = set(names)
    return [each for each in workers if each.name in named]


def _worker_row(
    run: Run, workers: Sequence[Worker], worker: Worker, chosen: Choice | Infeasible
) -> dict[str, Any]:
    period = chosen.capacity.period_steps if isinstance(chosen, Choice) else 1
    cost_per_s = worker_cost_per_s(run, worker, period, run.published_bytes(period))
    runs = isinstance(chosen, Choice) and worker.name in chosen.names
    return {
        "name": worker.name,
        "runs": runs,
        "why": "part of the cheapest set" if runs else _why_not(run, workers, worker, chosen),
        "admitted_per_s": worker.admitted_per_s,
        "survival": worker.survival,
        "price_per_h": worker.price_per_h,
        "price_of_groups": PER_GROUPS * cost_per_s / max(worker.admitted_per_s, 1e-30),
    }


def _why_not(
    run: Run, workers: Sequence[Worker], worker: Worker, chosen: Choice | Infeasible
) -> str:
    if isinstance(chosen, Infeasible):
        return "no set suffices"
    with_it = assess(run, [*_members(workers, chosen.names), worker], Form.OVERLAPPED)
    if isinstance(with_it, Infeasible):
        return f"with it: {with_it.why}"
    if with_it.period_steps < chosen.capacity.period_steps:
        return f"with it weights must go out every {with_it.period_steps} steps"
    return "not needed"


def _found_json(found: Capacity | Infeasible) -> dict[str, Any]:
    if isinstance(found, Infeasible):
        return asdict(found)
    return {**asdict(found), "suffices": found.suffices, "wastes": found.wastes}


def render_plan(report: Mapping[str, Any]) -> str:
    """The report as tables for people."""
    lines = [*_head(report), "", *_forms(report["forms"]), "", *_fleet(report["workers"])]
    if report["notes"]:
        lines += ["", *(f"- {note}" for note in report["notes"])]
    return "\n".join(lines)


def _head(report: Mapping[str, Any]) -> Iterable[str]:
    run, chosen = report["run"], report["chosen"]
    yield (
        f"Learner: {run['groups_per_step']} groups a step, {run['train_s']:g} s a step, S = "
        f"{run['staleness_max']}. Workers generate while weights arrive; margin "
        f"{report['margin']:g}."
    )
    if not report["feasible"]:
        yield f"No plan ({chosen['obstacle']}): {chosen['why']}"
        return
    cost = chosen["cost"]
    yield (
        f"Run {len(chosen['names'])} of {len(report['workers'])} workers for "
        f"${chosen['cost_per_h']:.2f} an hour besides the learner's ${run['price_per_h']:.2f}: "
        f"${sum(cost.values()):.3f} a step (learner {cost['learner']:.3f}, workers "
        f"{cost['workers']:.3f}, egress {cost['egress']:.3f})."
    )
    yield (
        f"Publish every {chosen['period_steps']} steps, {chosen['published_bytes'] / 1e6:,.1f} MB: "
        f"{chosen['broadcast_s']:.1f} s until the last worker has it. Allow "
        f"{chosen['inflight_groups']} groups generating or waiting."
    )


def _forms(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    yield (
        f"{'form':<12}{'κ':>3}  {'workers':>7}{'required/s':>12}{'offered/s':>11}{'T_bcast':>9}"
        f"{'step s':>8}{'learner':>9}{'oldest':>8}{'$/step':>9}"
    )
    for row in rows:
        star = "*" if row["is_default"] else " "
        start = f"{row['form']:<12}{row['period_steps'] or '-':>3}{star} {row['workers']:>7}"
        if "obstacle" in row:
            yield f"{start}  {row['obstacle']}: {row['why']}"
            continue
        waste = "  wastes samples" if row["wastes"] else ""
        yield (
            f"{start}{row['required_per_s']:>12.4g}{row['offered_per_s']:>11.4g}"
            f"{row['broadcast_s']:>9.1f}{row['step_s']:>8.1f}{row['utilisation']:>9.1%}"
            f"{row['staleness_worst']:>8}{sum(row['cost'].values()):>9.3f}{waste}"
        )
    yield "* the paper's κ = S - 1; paused is its model, in which generation stops for a broadcast"


def _fleet(workers: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    width = max([len(each["name"]) for each in workers] + [6]) + 2
    yield (
        f"{'worker':<{width}}{'':<9}{'groups/h':>9}{'survives':>10}{'$/h':>8}"
        f"{f'$/{PER_GROUPS} groups':>15}"
    )
    for each in sorted(workers, key=lambda row: (not row["runs"], row["price_of_groups"])):
        yield (
            f"{each['name']:<{width}}{'run' if each['runs'] else 'stand by':<9}"
            f"{each['admitted_per_s'] * SECONDS_PER_H:>9.1f}{each['survival']:>10.1%}"
            f"{each['price_per_h']:>8.2f}{each['price_of_groups']:>15.3f}  {each['why']}"
        )
