"""`swarm-coordinator plan`: the planned workers, and why. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.model.activation import Choice, cheapest_set
from coordinator.model.capacity import (
    SECONDS_PER_H,
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


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One form and period with the number of its workers."""

    form: Form
    period_steps: int
    is_default: bool  # κ = S - 1
    workers: int
    found: Capacity | Infeasible


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker's supply and costs."""

    name: str
    runs: bool
    why: str
    admitted_per_s: float
    survival: float
    price_per_h: float
    price_of_groups: float  # dollars for `PER_GROUPS` admissible groups, egress included


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The contents of a plan's tables. `chosen` is for overlapped workers, as nodes are."""

    run: Run
    margin: float
    chosen: Choice | Infeasible
    rows: tuple[PlanRow, ...]
    workers: tuple[PlannedWorker, ...]
    notes: tuple[str, ...]


def make_report(file: PlanFile) -> PlanReport:
    run, workers, margin = file.run, file.workers, file.settings.margin
    chosen = cheapest_set(run, workers, Form.OVERLAPPED, margin)
    rows: list[PlanRow] = []
    for form in Form:
        found = chosen if form is Form.OVERLAPPED else cheapest_set(run, workers, form, margin)
        members = workers if isinstance(found, Infeasible) else _members(workers, found.names)
        default = default_period(run)
        at_default = assess(run, members, form, default)
        rows.append(PlanRow(form, default, True, len(members), at_default))
        best = assess(run, members, form)
        if isinstance(best, Infeasible):
            rows.append(PlanRow(form, 0, False, len(members), best))
        elif best.period_steps != default:
            rows.append(PlanRow(form, best.period_steps, False, len(members), best))
    told = tuple(_worker_row(run, workers, each, chosen) for each in workers)
    return PlanReport(run, margin, chosen, tuple(rows), told, tuple(_notes(run, rows, chosen)))


def _members(workers: Iterable[Worker], names: Iterable[str]) -> list[Worker]:
    named = set(names)
    return [each for each in workers if each.name in named]


def _worker_row(
    run: Run, workers: Sequence[Worker], worker: Worker, chosen: Choice | Infeasible
) -> PlannedWorker:
    names: tuple[str, ...] = chosen.names if isinstance(chosen, Choice) else ()
    period = chosen.capacity.period_steps if isinstance(chosen, Choice) else 1
    cost_per_s = worker_cost_per_s(run, worker, period, run.published_bytes(period))
    runs = worker.name in names
    return PlannedWorker(
        name=worker.name,
        runs=runs,
        why=_why(run, workers, worker, chosen, runs),
        admitted_per_s=worker.admitted_per_s,
        survival=worker.survival,
        price_per_h=worker.price_per_h,
        price_of_groups=PER_GROUPS * cost_per_s / max(worker.admitted_per_s, 1e-30),
    )


def _why(
    run: Run, workers: Sequence[Worker], worker: Worker, chosen: Choice | Infeasible, runs: bool
) -> str:
    if isinstance(chosen, Infeasible):
        return "no set suffices"
    if runs:
        return "part of the cheapest set"
    with_it = assess(run, [*_members(workers, chosen.names), worker], Form.OVERLAPPED)
    if isinstance(with_it, Infeasible):
        return f"with it: {with_it.why}"
    if with_it.period_steps < chosen.capacity.period_steps:
        return f"with it weights must go out every {with_it.period_steps} steps"
    return "not needed"


def _notes(run: Run, rows: Sequence[PlanRow], chosen: Choice | Infeasible) -> Iterable[str]:
    for row in rows:
        if not row.is_default or isinstance(row.found, Infeasible) or not row.found.wastes:
            continue
        said = f"{row.form}: κ = S - 1 = {row.period_steps} would waste samples, for some would be "
        said += f"{row.found.staleness_worst} steps old and S = {run.staleness_max}"
        best = [each for each in rows if each.form is row.form and not each.is_default]
        if best and isinstance(best[0].found, Capacity):
            said += f"; use κ = {best[0].period_steps}"
        yield said
    if default_period(run) < 1:
        yield f"S = {run.staleness_max} has no κ = S - 1; κ is at least 1"
    if isinstance(chosen, Choice):
        yield (
            "more workers would not make a step shorter: the learner is the limit at "
            f"{run.train_s:g} s a step"
        )


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The same as `render_plan`, for `--json`."""
    chosen = report.chosen
    if isinstance(chosen, Choice):
        names = {"names": list(chosen.names), "cost_per_h": chosen.cost_per_h}
        choice: dict[str, Any] = names | _found_json(chosen.capacity)
    else:
        choice = _found_json(chosen)
    return {
        "run": asdict(report.run),
        "margin": report.margin,
        "feasible": isinstance(chosen, Choice),
        "chosen": choice,
        "forms": [
            {
                "form": row.form,
                "period_steps": row.period_steps,
                "is_default": row.is_default,
                "workers": row.workers,
                **_found_json(row.found),
            }
            for row in report.rows
        ],
        "workers": [asdict(each) for each in report.workers],
        "notes": list(report.notes),
    }


def _found_json(found: Capacity | Infeasible) -> dict[str, Any]:
    if isinstance(found, Infeasible):
        return asdict(found)
    return {**asdict(found), "suffices": found.suffices, "wastes": found.wastes}


def render_plan(report: PlanReport) -> str:
    """Tables for people."""
    lines = [*_head(report), "", *_forms(report), "", *_fleet(report)]
    if report.notes:
        lines += ["", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines)


def _head(report: PlanReport) -> Iterable[str]:
    run, chosen = report.run, report.chosen
    yield (
        f"Learner: {run.groups_per_step} groups a step, {run.train_s:g} s a step, S = "
        f"{run.staleness_max}. Workers generate while weights arrive; margin {report.margin:g}."
    )
    if isinstance(chosen, Infeasible):
        yield f"No plan ({chosen.obstacle}): {chosen.why}"
        return
    found = chosen.capacity
    yield (
        f"Run {len(chosen.names)} of {len(report.workers)} workers for ${chosen.cost_per_h:.2f} an "
        f"hour besides the learner's ${run.price_per_h:.2f}: ${found.cost.total:.3f} a step "
        f"(learner {found.cost.learner:.3f}, workers {found.cost.workers:.3f}, egress "
        f"{found.cost.egress:.3f})."
    )
    yield (
        f"Publish every {found.period_steps} steps, {found.published_bytes / 1e6:,.1f} MB: "
        f"{found.broadcast_s:.1f} s until the last worker has it. Allow "
        f"{found.inflight_groups} groups generating or waiting."
    )


def _forms(report: PlanReport) -> Iterable[str]:
    yield (
        f"{'form':<12}{'κ':>3}  {'workers':>7}{'required/s':>12}{'offered/s':>11}{'T_bcast':>9}"
        f"{'step s':>8}{'learner':>9}{'oldest':>8}{'$/step':>9}"
    )
    for row in report.rows:
        start = f"{row.form:<12}{row.period_steps or '-':>3}{'*' if row.is_default else ' '}"
        if isinstance(row.found, Infeasible):
            yield f"{start} {row.workers:>7}  {row.found.obstacle}: {row.found.why}"
            continue
        found = row.found
        waste = "  wastes samples" if found.wastes else ""
        yield (
            f"{start} {row.workers:>7}{found.required_per_s:>12.4g}{found.offered_per_s:>11.4g}"
            f"{found.broadcast_s:>9.1f}{found.step_s:>8.1f}{found.utilisation:>9.1%}"
            f"{found.staleness_worst:>8}{found.cost.total:>9.3f}{waste}"
        )
    yield "* the paper's κ = S - 1; paused is its model, in which generation stops for a broadcast"


def _fleet(report: PlanReport) -> Iterable[str]:
    width = max([len(each.name) for each in report.workers] + [6]) + 2
    yield (
        f"{'worker':<{width}}{'':<9}{'groups/h':>9}{'survives':>10}{'$/h':>8}"
        f"{f'$/{PER_GROUPS} groups':>15}"
    )
    for each in sorted(report.workers, key=lambda row: (not row.runs, row.price_of_groups)):
        yield (
            f"{each.name:<{width}}{'run' if each.runs else 'stand by':<9}"
            f"{each.admitted_per_s * SECONDS_PER_H:>9.1f}{each.survival:>10.1%}"
            f"{each.price_per_h:>8.2f}{each.price_of_groups:>15.3f}  {each.why}"
        )
