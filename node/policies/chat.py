"""A conversation with a model directory, in the terminal. A child process of the command, because
torch stays out of the node's own. It takes a node's share of the cores.

    python -m node.policies.chat DIRECTORY [--system TEXT] [--max-new-tokens N] [--temperature T]
        [--chat JSON] [--once]

`--chat` has the arguments of its chat template.
"""

import argparse
import sys
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from node.interfaces.prompts import PLAIN_RULES, Prompt, TemplateRules
from node.policies.policy import Policy, load_policy
from node.system.machine import core_count, counted, threads_of
from swarm.errors import ConfigError
from swarm.texts import printable


class _Printer(TextStreamer):
    """Prints a reply as it comes, without control characters, and keeps it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.said = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.said += text
        sys.stdout.write("\n".join(printable(line, len(line)) for line in text.split("\n")))
        sys.stdout.write("\n" if stream_end else "")
        sys.stdout.flush()


def chat(policy: Policy, system: str, max_new_tokens: int, temperature: float) -> None:
    """Answer each line of standard input, in one conversation, until it ends. Prompts are those of
    a run: `system` and earlier messages come before the question."""
    said: list[tuple[str, str]] = []  # questions and replies
    interactive = sys.stdin.isatty()
    if interactive:
        sys.stdout.write(f"{policy.name}: ask it something; /new begins anew, Ctrl-D ends\n")
    while line := _line("> " if interactive else ""):
        question = line.strip()
        if question == "/new":
            said.clear()
        if question in ("", "/new"):
            continue
        prompt = Prompt.of(question, system, said).text
        reply = _reply(policy, prompt, max_new_tokens, temperature)
        if reply is None:
            said.clear()
            sys.stdout.write(f"over {policy.context_tokens} tokens in all: ask anew\n")
            continue
        said.append((question, reply))


def answer_once(policy: Policy, max_new_tokens: int, temperature: float) -> None:
    """Answer all of standard input, as it is; ConfigError: there is no room for an answer."""
    prompt = sys.stdin.read()
    if _reply(policy, prompt, max_new_tokens, temperature) is None:
        raise ConfigError(f"the prompt has over {policy.context_tokens} tokens; take a shorter one")


def _reply(policy: Policy, prompt: str, max_new_tokens: int, temperature: float) -> str | None:
    """The model's reply, shown as it comes; None: the prompt leaves no room for an answer."""
    ids = policy.encode_prompt(prompt)
    room = policy.context_tokens - len(ids)
    if room < 1:
        return None
    printer = _Printer(policy.tokenizer)
    model: Any = policy.model  # what it can do beyond a module is told at run time
    with torch.inference_mode(), policy.autocast():
        model.generate(
            torch.tensor([ids], device=policy.device),
            max_new_tokens=min(room, max_new_tokens),
            do_sample=temperature > 0,
            temperature=temperature or None,
            eos_token_id=sorted(policy.eos_ids),
            pad_token_id=policy.eos_id,
            streamer=printer,
        )
    return printer.said


def _line(prompt: str) -> str:
    """The next line with its end; empty at the end of the input."""
    sys.stdout.write(prompt)
    sys.stdout.flush()
    return sys.stdin.readline()


def main() -> int:
    parser = argparse.ArgumentParser(prog="swarm-node chat")
    parser.add_argument("directory")
    parser.add_argument("--system", default="")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--chat", default=PLAIN_RULES.arguments)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    try:
        with counted() as sharers:
            torch.set_num_threads(threads_of(core_count(), sharers()))
            rules = TemplateRules(options.chat)
            policy = load_policy(options.directory, template_rules=rules)
            if options.once:
                answer_once(policy, options.max_new_tokens, options.temperature)
                return 0
            chat(policy, options.system, options.max_new_tokens, options.temperature)
    except ConfigError as error:
        sys.stderr.write(f"swarm-node: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
