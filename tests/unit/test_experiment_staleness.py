"""The experiment on staleness has the staleness that it says, and its table what was measured."""

import pytest

from tests.support import run, script

for imported in ("on_record", "experiment_sapo"):
    script(imported)
experiment = script("experiment_staleness")
STEPS = 20


def behind(staleness: int) -> tuple[list[int], list[int]]:
    """How far behind the policy each batch is when it is trained on, and their numbers."""
    version = 0
    found, numbers = [], []

    async def generate(number: int) -> tuple[int, int]:
        return number, version

    async def body() -> None:
        nonlocal version
        ahead = experiment.Ahead(staleness, STEPS, generate)
        for step in range(STEPS):
            number, made_by = await ahead.batch(step)
            numbers.append(number)
            found.append(version - made_by)
            version += 1

    run(body)
    return found, numbers


@pytest.mark.parametrize("staleness", experiment.STALENESS)
def test_batches_come_in_order_and_as_old_as_they_shall_be(staleness):
    found, numbers = behind(staleness)
    assert found == [min(step, staleness) for step in range(STEPS)]
    assert numbers == list(range(STEPS))


def result(loss: str, staleness: int, seed: int, passed: float) -> dict:
    step = {
        "staleness_mean": staleness, "staleness_max": staleness, "trained_tokens": 10,
        "clip_fraction": 0.25, "mask_fraction": 0.0, "mismatch_k3": 0.5 if seed == 1 else None,
        "effective_share": 0.9,
    }  # fmt: skip
    return {
        "learning_rate": 1e-4, "loss": loss, "staleness": staleness, "seed": seed, "steps": [step],
        "evaluations": [(0, 0.4), (1, passed)], "spent_s": {"generate": 2.0, "train": 3.0},
        "wall_s": 9.0,
    }  # fmt: skip


def test_the_table_pairs_runs_by_seed():
    results = [
        result("grpo", staleness, seed, 0.5 + 0.1 * seed - 0.01 * staleness)
        for staleness in (0, 6)
        for seed in (2, 1)
    ]
    fresh, stale = experiment.table(results).splitlines()[4:6]
    assert fresh.startswith("| grpo | 0 | 65.0 ± ")
    assert "| – |" in fresh
    cells = [cell.strip() for cell in stale.split("|")]
    assert cells[4] == "-6.0 ± 0.0"  # the spread between seeds is not in it
    assert cells[6:9] == ["6.00", "6", "0.5000"]
    assert cells[-3:-1] == ["2 + 3", "9"]
