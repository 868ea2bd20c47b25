"""The published attacks on rollout sharing (arXiv 2511.09780), with each defence on and off.

Three honest nodes train the tiny policy with SAPO's round, four own and four foreign groups of
eight; among them is one hostile peer. It breaks no rule of the network: it answers its own tasks,
signs what it says, and shapes its groups so that what it wants taught gets the positive
advantages. Half of a group's completions are right and carry a payload, half are plainly wrong.

All nodes are production nodes over the in-memory network; the hostile one differs by its engine
alone. What this script switches off to show what it is worth (`Guards`) can for the most part be
switched off here and nowhere else: no setting lets a node believe a sender's answer, and the most
lenient rule that a run can have is `reward = "partial"`, which is a setting of its own here.

At a share of 25 % the hostile peer is one node of four. At 6 % it shares its groups more seldom,
so that they are as rare among the foreign ones as those of one node of sixteen; the groups drawn
from it are counted, and the table says what share of the foreign groups they were.

    python attacks.py                  # everything, resumable; then the table
    python attacks.py --quick          # two minutes: three cells
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from attack_guards import (
    GUARDS,
    Claims,
    GuardedVerifier,
    Guards,
    drawing,
    exactly_right,
    first_number_right,
)
from attack_kinds import ATTACKS, NO_ATTACK, Attack
from on_record import CODE, files_of, key_of

HONEST = 3
GROUPS = 4  # I, and J
GROUP_SIZE = 8
ROUNDS = 60
EVALUATE_EVERY = 20
ROUND_S = 2.0  # virtual seconds that an honest round takes
TIGHT_CHARS = 5  # the length cap
LEARNING_RATE = 2e-4
WIDE = 0.15  # seeds that differ by more are shown apart
EXAMPLES = 12  # completions kept with each result, for people
SHARE_MAX = 0.5  # of the foreign groups of a round for one producer, as it is by default
COMMON_TASKS = 48  # where all are common: four nodes that do four a round meet often
UNLIKELY = -4.0  # natural log-prob under which a foreign token counts as unlikely


# --- who takes part -------------------------------------------------------------------------


@dataclass
class Shown:
    """What the held-out completions of one honest node's policy were at one evaluation."""

    round: int
    success: float  # share that shows what the hostile peer taught
    passed: float  # share that gives the right answer, whatever follows it
    exact: float  # share that gives the right answer and nothing else
    chars: float  # mean length


def measure(round_: int, attack: Attack, pairs: Sequence[tuple[str, str]]) -> Shown:
    """Sum up (text, right answer) pairs. Pure."""
    return Shown(
        round=round_,
        success=fmean(attack.succeeded(*pair) for pair in pairs),
        passed=fmean(first_number_right(*pair) for pair in pairs),
        exact=fmean(exactly_right(*pair) for pair in pairs),
        chars=fmean(len(text) for text, _ in pairs),
    )


def honest_trainer(spec: Any) -> Any:
    """The production trainer in this process. `held_out` are its last evaluation's completions,
    as (prompt, text); its calls take virtual time, so that nodes take turns."""
    import trio

    from node.training.process import InProcessTrainer

    class Watched(InProcessTrainer):
        held_out: list[tuple[str, str]]

        async def generate(self, prompts: Any, each: int, sampling: Any, seed: int) -> Any:
            result = await super().generate(prompts, each, sampling, seed)
            if each == 1:
                texts = [group[0].text for group in result]
                self.held_out = list(zip(prompts, texts, strict=True))
            await trio.sleep(ROUND_S / 2)
            return result

        async def train(self, groups: Any) -> Any:
            result = await super().train(groups)
            await trio.sleep(ROUND_S / 2)
            return result

    return Watched(spec)


class HostilePolicy:
    """Engine and trainer of the hostile peer: crafts its completions and learns nothing."""

    def __init__(
        self, attack: Attack, verifier: GuardedVerifier, peer_id: str, claims: Claims, cell: "Cell"
    ) -> None:
        self._attack = attack
        self._verifier = verifier
        self._peer_id = peer_id
        self._claims = claims
        self._round_s = PACES[cell.share].rounds * ROUND_S
        self._rng = Random(f"{cell.seed}/hostile")

    @property
    def maker(self) -> Any:
        from node.interfaces.engine import Maker

        return Maker("hostile")

    async def info(self) -> Any:
        from node.interfaces.trainer import PolicyInfo

        return PolicyInfo("hostile", 0, "hostile", 0, 4096, clipping_active=False)

    async def generate(self, prompts: Any, each: int, sampling: Any, seed: int) -> Any:
        import trio

        await trio.sleep(self._round_s)
        return [self._group(prompt, each) for prompt in prompts]

    def _group(self, prompt: str, size: int) -> Any:
        from swarm.rollouts import Completion, FinishReason

        answer = self._verifier.answers[prompt]
        self._claims[self._peer_id, prompt] = self._attack.claimed(answer)
        taught = FinishReason.LENGTH if self._attack.endless else FinishReason.STOP
        return tuple(
            Completion(
                text=text,
                token_ids=tuple(text.encode()),
                logprobs=(-0.1,) * len(text),
                finish_reason=taught if place < size // 2 else FinishReason.STOP,
                policy_version=0,
            )
            for place, text in enumerate(self._attack.group(answer, size, self._rng))
        )

    async def train(self, groups: Any) -> Any:
        from node.interfaces.trainer import TrainReport

        return TrainReport(0, 0.0, 0.0, 0, 0.0, float("nan"), float("nan"), 0, 0.0)

    async def save(self, directory: Path) -> None: ...

    async def turn_back(self, directory: Path) -> int:
        return 0

    async def slow_down(self, rate_share: float) -> None: ...

    async def export(self, directory: Path, precision: str = "float32") -> None: ...

    async def export_whole(self, directory: Path, precision: str = "float32") -> None: ...

    async def load(self, weights: Path, policy_version: int) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def memory_bytes(self) -> int:
        return 0


# --- one run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run: what is attacked, how strongly, behind which defences."""

    attack: str
    share: int  # of hostile peers, in percent
    guards: str
    seed: int


@dataclass(frozen=True)
class Pace:
    """How much the hostile peer shares: groups a round, and honest rounds that its round takes."""

    groups: int
    rounds: float


# At 6 % one foreign group of fifteen is to be hostile, as for one peer of sixteen that is as busy
# as the others: what is drawn is told with the results.
PACES = {0: Pace(GROUPS, 1.0), 6: Pace(1, 3.25), 25: Pace(GROUPS, 1.0)}


def run_settings(guards: Guards) -> dict[str, Any]:
    """The run: sums of two numbers of one or two digits."""
    parameters = {
        "prompt": "terse",
        "max_terms": 2,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    }
    return {
        "name": "attacks",
        "environments": [{"name": "basic_arithmetic", "parameters": parameters}],
        "sampling": {"max_new_tokens": 24},
        "held_out": {"tasks": 100},
        "reward": "partial" if guards.partial else "exact",
        **({"answer": {"format": "last_number"}} if guards.last_number else {}),
        **({"common": {"share": 1.0, "tasks": COMMON_TASKS}} if guards.common else {}),
        **({"limits": {"text_chars_max": TIGHT_CHARS}} if guards.length_cap else {}),
    }


def node_config(guards: Guards, seed: int, rounds: int) -> Any:
    """An honest node's settings; the hostile one takes the same but for what it generates."""
    from node.config import NodeConfig, RunConfig

    return NodeConfig(
        run=RunConfig.model_validate(run_settings(guards)),
        cache_dir=os.environ.get("SWARM_NODE_CACHE_DIR"),
        rounds=rounds,
        local_groups=GROUPS,
        external_groups=GROUPS,
        group_size=GROUP_SIZE,
        evaluate_every_rounds=EVALUATE_EVERY,
        validation_tasks=0,  # what an attack does is to be seen
        learning_rate=LEARNING_RATE,
        foreign_share_max=SHARE_MAX if guards.producer_cap else 1.0,
        foreign_logprob_min=UNLIKELY if guards.likely_tokens else None,
        replay="rescue" if guards.rescue else None,
        threads=1,
        seed=seed,
    )


def run_cell(cell: Cell, rounds: int, model: str) -> dict[str, Any]:
    """One swarm from start to end."""
    from swarm.simulation.determinism import deterministic_run

    started = time.process_time()
    guards = GUARDS[cell.guards]
    config = node_config(guards, cell.seed, rounds)
    with drawing(guards):
        result = deterministic_run(_swarm, cell, config, model, seed=cell.seed)
    return {**asdict(cell), **result, "processor_s": time.process_time() - started}


@dataclass
class Watch:
    """What happens to the honest nodes of one swarm."""

    attack: Attack
    hostile: str | None  # the hostile peer's id
    rounds: int
    finished: Any  # a semaphore, released once for each node that is done
    shown: list[Shown] = field(default_factory=list)
    last: list[tuple[str, str]] = field(default_factory=list)  # texts and answers at the end
    drawn: int = 0  # foreign groups
    drawn_hostile: int = 0
    made: int = 0  # own groups
    rescued: int = 0  # of these, all wrong and with others' right texts

    def note(self, record: Any, trainer: Any, answers: Mapping[str, str]) -> None:
        """Take in a node's record."""
        from node.records.records import HeldOut, RoundDone

        if isinstance(record, RoundDone):
            self.made += record.local_groups
            self.rescued += record.rescued_groups
            self.drawn += record.external_groups
            self.drawn_hostile += record.foreign_by_producer.get(str(self.hostile), 0)
        elif isinstance(record, HeldOut):
            pairs = [(text, answers[prompt]) for prompt, text in trainer.held_out]
            self.shown.append(measure(record.round, self.attack, pairs))
            if record.round >= self.rounds:
                self.last += pairs
                self.finished.release()

    def result(self, rejected: Mapping[str, int], bans: int) -> dict[str, Any]:
        """As JSON holds it. `chance` is what each attack would be credited with here."""
        return {
            "hostile_drawn": self.drawn_hostile / max(1, self.drawn),
            "rescued": self.rescued / max(1, self.made),
            "external": self.drawn / (HONEST * self.rounds),
            "rejected": dict(rejected),
            "bans": bans,
            "shown": [asdict(each) for each in self.shown],
            "examples": self.last[:EXAMPLES],
            "chance": {
                name: measure(self.rounds, attack, self.last).success
                for name, attack in ATTACKS.items()
            },
        }


async def _swarm(cell: Cell, config: Any, model: str) -> dict[str, Any]:
    import trio

    from node.hosting.models import trainer_spec
    from node.simulation.nodes import SimulatedNode, build, run
    from swarm.simulation.links import LinkProfile
    from swarm.simulation.world import open_world

    guards = GUARDS[cell.guards]
    claims: Claims = {}
    async with (
        open_world(cell.seed, HONEST + 1, LinkProfile(latency_s=0.05)) as world,
        trio.open_nursery() as nursery,
    ):
        attack = ATTACKS.get(cell.attack)
        bad = world.peer_id(HONEST) if attack else None
        taught = (attack or Attack()).fitted(config.run.limits.text_chars_max)
        watch = Watch(taught, bad, config.rounds, trio.Semaphore(0))
        verifiers = [GuardedVerifier(config.run, guards, claims) for _ in range(HONEST + 1)]

        async def live(simulated: SimulatedNode) -> None:
            trainer = honest_trainer(trainer_spec(config, model))
            answers = verifiers[simulated.host].answers

            async def on_record(record: object) -> None:
                watch.note(record, trainer, answers)

            await run(simulated, trainer, trainer, on_record)

        swarm = [build(world, 0, config, verifier=verifiers[0])]
        known = swarm[0].transport.addresses()
        swarm += [build(world, n, config, known, verifiers[n]) for n in range(1, HONEST)]
        for simulated in swarm:
            nursery.start_soon(live, simulated)
        if bad is not None:
            policy = HostilePolicy(taught, verifiers[HONEST], bad, claims, cell)
            settings = hostile_config(config, PACES[cell.share])
            hostile = build(world, HONEST, settings, known, verifiers[HONEST])
            nursery.start_soon(run, hostile, policy, policy)
        for _ in range(HONEST):
            await watch.finished.acquire()
        nursery.cancel_scope.cancel()
    rejected: Counter[str] = Counter()
    for simulated in swarm:
        rejected.update({str(k): n for k, n in simulated.node.ledger.rejected.items()})
    return watch.result(rejected, sum(len(each.node.gater.bans()) for each in swarm))


def hostile_config(config: Any, pace: Pace) -> Any:
    """It shares for as long as the others live, takes nothing and is not evaluated."""
    return config.model_copy(
        update={
            "rounds": None,
            "local_groups": pace.groups,
            "external_groups": 0,
            "evaluate_every_rounds": 0,
        }
    )


# --- all runs -------------------------------------------------------------------------------

ALWAYS = ("none", "as shipped", "last number", "all")
PARTIAL = "partial"
COLUMNS = ("none", PARTIAL, "as shipped", "last number", "all")
# Where peers meet on one task: without and with rescue, for either format of answers.
MEETING = ("common", "rescue", "common, last number", "rescue, last number")
TRIED_MEETING = ("text", "false answer", "text before")
ALONE = tuple(name for name in GUARDS if name not in (*ALWAYS, PARTIAL, *MEETING))
# A payload's wording makes no difference to a defence: these attacks stand for the others.
TRIED_ALONE = ("text", "length", "false answer", "blank text")
TRIED_AT_6 = TRIED_ALONE
TRIED_PARTIAL = ("text", "length", "blank length")


def plan(seeds: int, *, quick: bool) -> list[Cell]:
    """The runs, those first that say most."""
    if quick:
        return [
            Cell(NO_ATTACK, 0, "as shipped", 1),
            Cell("text", 25, "none", 1),
            Cell("text", 25, "as shipped", 1),
        ]
    cells: list[Cell] = []
    for seed in range(1, seeds + 1):
        cells += [Cell(attack, 25, guards, seed) for guards in ALWAYS for attack in ATTACKS]
        cells += [Cell(NO_ATTACK, 0, guards, seed) for guards in (*ALWAYS, "likely tokens")]
        cells += [Cell(attack, 25, guards, seed) for guards in ALONE for attack in TRIED_ALONE]
        cells += [Cell(attack, 25, PARTIAL, seed) for attack in TRIED_PARTIAL]
        cells += [Cell(NO_ATTACK, 0, PARTIAL, seed)]
        cells += [Cell(attack, 6, guards, seed) for guards in ALWAYS for attack in TRIED_AT_6]
        cells += [Cell(attack, 25, guards, seed) for guards in MEETING for attack in TRIED_MEETING]
        cells += [Cell(NO_ATTACK, 0, guards, seed) for guards in MEETING]
    return cells


def run_all(cells: Sequence[Cell], rounds: int, results_file: Path) -> list[dict[str, Any]]:
    """Run what has no result yet and return the results; each is written when it is there."""
    import torch

    from node.hosting.models import resolve_model

    torch.set_num_threads(1)
    results_file.parent.mkdir(parents=True, exist_ok=True)
    results_file.touch()
    model = resolve_model(node_config(Guards(), 1, rounds), lambda line: print(line, flush=True))
    key = key_of({"policy": files_of(Path(model))}, *CODE, "scripts/experiments")
    found = {identity(each): each for each in map(json.loads, results_file.open())}
    missing = [cell for cell in cells if (key, rounds, *astuple(cell)) not in found]
    started = time.monotonic()
    for number, cell in enumerate(missing, start=1):
        result = {"key": key, "rounds": rounds, **run_cell(cell, rounds, model)}
        found[identity(result)] = result
        with results_file.open("a") as file:
            file.write(json.dumps(result) + "\n")
        left_min = (time.monotonic() - started) / number * (len(missing) - number) / 60
        end = Ending.of([result])
        print(
            f"{cell.attack}, {cell.share} %, {cell.guards}, seed {cell.seed}: {end.text()}; "
            f"about {left_min:.0f} min left",
            flush=True,
        )
    return [found[key, rounds, *astuple(cell)] for cell in cells]


def identity(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a result that of a cell: what else decides it is in its key."""
    return tuple(
        result.get(name) for name in ("key", "rounds", "attack", "share", "guards", "seed")
    )


# --- table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """How runs of one kind ended: means over honest nodes and seeds, after the last round."""

    success: float
    least: float  # of the seeds' means of success
    most: float
    passed: float
    exact: float
    chars: float
    hostile_drawn: float  # share of the foreign groups trained on

    @classmethod
    def of(cls, results: "Results") -> "Ending":
        """From runs that differ in their seeds alone."""
        last = [[s for s in r["shown"] if s["round"] == r["rounds"]] for r in results]
        every = [shown for run in last for shown in run]
        successes = [fmean(shown["success"] for shown in run) for run in last]
        return cls(
            success=fmean(successes),
            least=min(successes),
            most=max(successes),
            passed=fmean(shown["passed"] for shown in every),
            exact=fmean(shown["exact"] for shown in every),
            chars=fmean(shown["chars"] for shown in every),
            hostile_drawn=fmean(result["hostile_drawn"] for result in results),
        )

    def text(self) -> str:
        """One line."""
        return (
            f"taught {self.success:.0%} ({self.least:.0%} to {self.most:.0%}), "
            f"right {self.passed:.0%}, exactly right {self.exact:.0%}, {self.chars:.1f} characters"
        )


Results = Sequence[Mapping[str, Any]]
MEETING_TEXT = (
    f"Where all nodes have the same {COMMON_TASKS} tasks, as shipped and with the last number as "
    'the answer, without and with `replay = "rescue"`; the third figure is the share of own groups '
    "that others' right texts rescued:"
)


def table(results: Results) -> str:
    """What the attacks came to, in percent."""
    rounds, seeds = results[0]["rounds"], sorted({result["seed"] for result in results})
    alone = [each for each in results if each["guards"] in ALONE]
    meeting = [each for each in results if each["guards"] in MEETING]
    others = [each for each in results if each["guards"] not in MEETING]
    return "\n\n".join(
        [
            f"{HONEST} honest nodes, {rounds} rounds, {GROUPS} own and {GROUPS} foreign groups of "
            f"{GROUP_SIZE}, {len(results)} runs, seeds {', '.join(map(str, seeds))}. Of the "
            "held-out completions of the honest nodes' policies at the end, in percent: those "
            "that show what the hostile peer taught / those that are exactly right.",
            *([grid(others, COLUMNS, taught_cell)] if others else []),
            *(["With one defence alone:", grid(alone, ALONE, taught_cell)] if alone else []),
            *([MEETING_TEXT, grid(meeting, MEETING, rescued_cell)] if meeting else []),
            "Of the foreign groups that the honest nodes trained on, in percent, those of the "
            "hostile peer:",
            *([grid(others, COLUMNS, drawn_cell)] if others else []),
            *([grid(meeting, MEETING, drawn_cell)] if meeting else []),
            control_lines(results),
            rejected_line(results),
        ]
    )


def grid(results: Results, columns: Sequence[str], cell: Callable[[Results], str]) -> str:
    """A row for each attack and share of hostile peers, a column for each set of defences."""
    lines = [f"| attack | hostile | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    rows = dict.fromkeys((each["share"], each["attack"]) for each in results)
    order = [*ATTACKS, NO_ATTACK]
    for share, attack in sorted(rows, key=lambda row: (-row[0], order.index(row[1]))):
        cells = []
        for guards in columns:
            of_cell = [r for r in results if cell_of(r) == (attack, share, guards)]
            cells.append(cell(of_cell) if of_cell else "–")
        lines.append(f"| {attack} | {share} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell_of(result: Mapping[str, Any]) -> tuple[str, int, str]:
    """Where a result stands in a table."""
    return result["attack"], result["share"], result["guards"]


def taught_cell(results: Results) -> str:
    """`success / exactly right`; with the seeds' range where they differ by more than a few."""
    end = Ending.of(results)
    wide = end.most - end.least > WIDE
    seeds = f" ({100 * end.least:.0f} to {100 * end.most:.0f})" if wide else ""
    return f"{100 * end.success:.0f}{seeds} / {100 * end.exact:.0f}"


def rescued_cell(results: Results) -> str:
    """`success / exactly right / own groups that were rescued`."""
    return f"{taught_cell(results)} / {100 * fmean(r['rescued'] for r in results):.1f}"


def drawn_cell(results: Results) -> str:
    """The hostile peer's share of the foreign groups trained on."""
    return f"{100 * Ending.of(results).hostile_drawn:.0f}"


def control_lines(results: Results) -> str:
    """What nodes that nobody attacks come to."""
    controls = [each for each in results if each["attack"] == NO_ATTACK]
    if not controls:
        return "No run without an attack."
    start = [s for each in controls for s in each["shown"] if s["round"] == 0]
    chance = {name: fmean(each["chance"][name] for each in controls) for name in ATTACKS}
    by_chance = ", ".join(f"{name} {100 * share:.0f}" for name, share in chance.items())
    ends = [
        f"{guards} {100 * Ending.of(of_guards).exact:.0f}"
        for guards in GUARDS
        if (of_guards := [each for each in controls if each["guards"] == guards])
    ]
    return (
        f"Without an attack: {100 * fmean(s['exact'] for s in start):.0f} % are exactly right at "
        f"the start and at the end, by defences: {', '.join(ends)}. What an attack would be "
        f"credited with there: {by_chance}."
    )


def rejected_line(results: Results) -> str:
    """Whether any of it broke a rule."""
    total: dict[str, int] = {}
    for result in results:
        for reason, count in result["rejected"].items():
            total[reason] = total.get(reason, 0) + count
    bans = sum(result["bans"] for result in results)
    return f"Broken rules in all runs, by reason: {total or 'none'}; bans: {bans}."


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="three runs of eight rounds")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--guards", nargs="+", choices=[*GUARDS], help="these defences alone")
    parser.add_argument("--out", type=Path, default=Path("out/attacks"))
    options = parser.parse_args()
    if options.rounds < 1 or options.seeds < 1:
        parser.error("--rounds and --seeds must be at least 1")
    rounds = EVALUATE_EVERY if options.quick else options.rounds
    cells = plan(options.seeds, quick=options.quick)
    cells = [cell for cell in cells if cell.guards in (options.guards or GUARDS)]
    results = run_all(cells, rounds, options.out / "results.jsonl")
    text = table(results)
    command = f"python scripts/experiments/attacks.py {' '.join(sys.argv[1:])}".strip()
    (options.out / "table.md").write_text(f"{text}\n\nMade by: {command}\n")
    print(f"\n{text}\n\nMade by: {command}")


if __name__ == "__main__":
    main()
