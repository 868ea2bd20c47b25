"""Engines of vLLM built anew, one after the other, in one process that imports vLLM once.

Arguments: those of a vLLM server. Each line of input is JSON, a model directory and rows of token
ids; each line of output the log-probs of every row's tokens but its first, by an engine that was
built for this line alone, from the directory and with the server's arguments.
"""

import argparse
import gc
import json
import os
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.inputs import TokensPrompt
from vllm.utils.argparse_utils import FlexibleArgumentParser

Rows = list[list[int]]


def log_probs(server: argparse.Namespace, directory: Path, rows: Rows) -> list[list[float]]:
    """What an engine says that is built for the question and dropped after it."""
    arguments = EngineArgs.from_cli_args(server)
    arguments.model = str(directory)
    engine = LLM.from_engine_args(arguments)
    try:
        answers = engine.generate(
            [TokensPrompt(prompt_token_ids=row) for row in rows],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        return [
            [
                found[token].logprob
                for token, found in zip(row[1:], answer.prompt_logprobs[1:], strict=True)
            ]
            for row, answer in zip(rows, answers, strict=True)
        ]
    finally:
        del engine
        cleanup_dist_env_and_memory()


def main() -> None:
    """Answer until the input ends."""
    gc.freeze()  # what is imported is no garbage: else most of a build's time goes to looking at it
    gc.freeze = gc.unfreeze = lambda: None
    server = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    for line in sys.stdin:
        question = json.loads(line)
        found = log_probs(server, Path(question["directory"]), question["rows"])
        print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
