"""Models small enough to make within a test, with tokenizers to match."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from node.engines.torch_engine import Generation
from node.engines.vllm.text import ModelText
from node.interfaces.engine import Sampling, plain_requests
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy, load_policy
from node.policies.presets import TinyRecipe
from node.policies.tiny import blank_model, byte_tokenizer
from node.train.trainer import GroupTrainer
from swarm.rollouts import Completion, FinishReason

torch.set_num_threads(1)  # threads of so small models mostly wait for each other

SMALL = TinyRecipe(
    hidden=32, layers=2, heads=4, key_value_heads=2, head_size=8, intermediate=48,
    context_tokens=128, batch=8, steps=12, ramp_steps=3,
)  # fmt: skip


def qwen_directory(directory: Path, seed: int = 0) -> Path:
    """A Qwen3 with random weights, which the lean pass supports."""
    tokenizer = byte_tokenizer()
    model = blank_model(replace(SMALL, seed=SMALL.seed + seed), tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():  # random weights alone are nearly uniform
            parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def gpt2_directory(directory: Path, seed: int = 0) -> Path:
    """A GPT-2, which takes the Hugging Face path: learned positions, no rotary ones."""
    tokenizer = byte_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=128,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return _save(GPT2LMHeadModel, config, tokenizer, directory, seed)


def mamba_directory(directory: Path) -> Path:
    """A model with recurrent state."""
    tokenizer = byte_tokenizer()
    config = MambaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return _save(MambaForCausalLM, config, tokenizer, directory)


def _save(kind, config, tokenizer, directory: Path, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def open_policy(directory: Path) -> Policy:
    return load_policy(str(directory), "cpu")


def reference_logprobs(
    policy: Policy, prompt: str, completion: Completion, sampling: Sampling
) -> list[float]:
    """From one unpadded pass, with temperature and top-p by their definitions."""
    ids = policy.encode_prompt(prompt)
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*ids, *completion.token_ids]])).logits[0].double()
    values = []
    for offset, token in enumerate(completion.token_ids):
        probs = torch.softmax(logits[len(ids) - 1 + offset] / sampling.temperature, -1)
        kept: dict[int, float] = {}
        for index in probs.argsort(descending=True).tolist():
            if sum(kept.values()) < sampling.top_p:
                kept[index] = float(probs[index])
        values.append(math.log(kept[token] / sum(kept.values())))
    return values


def group(
    policy: Policy,
    prompt: str,
    texts: Sequence[str],
    advantages: Sequence[float],
    *,
    own: bool = True,
) -> TrainingGroup:
    """A group whose completions ended with EOS."""
    completions = []
    for text in texts:
        ids = (*policy.encode_completion(text), policy.eos_id)
        completions.append(Completion(text, ids, (0.0,) * len(ids), FinishReason.STOP, 0))
    return TrainingGroup(prompt, tuple(completions), tuple(advantages), own)


def step_of(policy: Policy, groups, spec: TrainerSpec, micro_batch_tokens: int = 100_000):
    """The report and gradient of one batch: a step of plain gradient descent, undone afterwards."""
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    trainer = GroupTrainer(policy, spec, micro_batch_tokens)
    trainer.optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    report = trainer.train(groups)
    after = dict(policy.model.named_parameters())
    gradient = torch.cat([(before[name] - after[name].detach()).flatten() for name in before])
    with torch.no_grad():
        for name, value in before.items():
            after[name].copy_(value)
    return report, gradient


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }


def model_text(directory: Path, policy: Policy) -> ModelText:
    """The tokenizer of the vLLM engine, with what a server says of the policy's tokenizer."""
    text = ModelText(directory)
    if (request := text.affixes_request()) is not None:
        text.take_affixes(policy.encode_plain(request["prompt"]))
    return text


def generate(
    policy: Policy,
    prompts: Sequence[str],
    completions_each: int,
    sampling: Sampling,
    seed: int,
    policy_version: int,
) -> list[tuple[Completion, ...]]:
    """Sample everything in one call; see `Engine.generate`."""
    requests = plain_requests(prompts, completions_each)
    generation = Generation(policy, requests, sampling, seed)
    while not generation.done:
        generation.advance(sampling.max_new_tokens, policy_version)
    return generation.completions()
