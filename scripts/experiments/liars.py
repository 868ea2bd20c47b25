"""What liars move of a shared map of difficulty, and what one group shows of edited text.

    python liars.py          # both tables, by the functions themselves, in seconds

Honest nodes have 32 tries each at a task that a third of the tries solves; liars say that it is
always solved. Edited text: of 100 tokens of random distributions so many are replaced, and their
log-probs are told as they are.
"""

import math
from random import Random
from statistics import fmean

from node.loops.claims import EVIDENCE_MAX, ClaimedToken, Fit, fit_of
from node.methods.control.shared import SharedMap, TriesReport
from node.methods.control.vade import Vade

SEEDS = 400
ALWAYS = 2**31
GROUPS, TOKENS, VOCABULARY = 30, 100, 50
DEVIATIONS = 5.0  # in standard errors: what is compared with


def report(name: str, tries: int, successes: int, voice: str) -> TriesReport:
    """On the one bucket there is."""
    return TriesReport(0, 0, name, 0, tries, successes, 1, voice)


def moved(honest: int, liars: int, own: int, *, is_block: bool) -> tuple[float, float]:
    """By how much a node's belief moves that has `own` tries itself: in the mean, and at most."""
    found = []
    for seed in range(SEEDS):
        rng = Random(seed)
        names = [f"honest-{n}" for n in range(honest)]
        said = [report(n, 32, sum(rng.random() < 1 / 3 for _ in range(32)), n) for n in names]
        keys = [f"liar-{n}" for n in range(liars)]
        lies = [report(key, ALWAYS, ALWAYS, "block" if is_block else key) for key in keys]
        beliefs = []
        for heard in (said, [*said, *lies]):
            map_ = SharedMap()
            map_.hear(heard)
            counts = map_.of(0, Vade().others_max)
            beliefs.append((counts.right + own / 3) / (counts.right + counts.wrong + own))
        found.append(abs(beliefs[1] - beliefs[0]))
    return fmean(found), max(found)


def edited(seed: int, share: float, sharpness: float) -> Fit:
    """One group, that share of whose tokens was replaced by any others."""
    rng, tokens = Random(seed), []
    for _ in range(TOKENS):
        logits = [sharpness * rng.gauss(0.0, 1.0) for _ in range(VOCABULARY)]
        total = math.log(math.fsum(map(math.exp, logits)))
        logs = [each - total for each in logits]
        likely = [math.exp(each) for each in logs]
        drawn = rng.choices(range(VOCABULARY), likely)[0]
        token = rng.randrange(VOCABULARY) if rng.random() < share else drawn
        mean = math.fsum(p * log for p, log in zip(likely, logs, strict=True))
        spread = math.fsum(p * (log - mean) ** 2 for p, log in zip(likely, logs, strict=True))
        tokens.append(ClaimedToken(logs[token], logs[token], mean, spread))
    return fit_of(tokens)


def main() -> None:
    """Print both."""
    print("| honest | liars | no tries of its own | with 32 | with 128 |\n|---|---|---|---|---|")
    cases = ((10, 1, False), (20, 10, True), (20, 10, False), (7, 10, True), (7, 10, False))
    for honest, liars, is_block in cases:
        cells = [moved(honest, liars, own, is_block=is_block) for own in (0, 32, 128)]
        told = " | ".join(f"{mean:.3f} ({most:.3f})" for mean, most in cells)
        print(f"| {honest} | {liars}{' of one block' if is_block else ''} | {told} |")
    print("\n| sharpness | edited | found | by standard errors |\n|---|---|---|---|")
    for sharpness in (2.0, 4.0, 6.0):
        for share in (0.0, 0.1, 0.2):
            fits = [edited(seed, share, sharpness) for seed in range(GROUPS)]
            found = sum(max(fit.likelier, fit.rarer) > EVIDENCE_MAX for fit in fits)
            before = sum(abs(fit.deviations) > DEVIATIONS for fit in fits)
            print(f"| {sharpness:g} | {share:.0%} | {found} of {GROUPS} | {before} |")


if __name__ == "__main__":
    main()
