"""The embedded preset `tiny`: a byte-level Qwen3 made and warmed up on the machine itself.

A short supervised phase on the run's tasks takes it to partial competence. On one machine the same
arguments give the same bits: one thread, one seeded generator, no timing in any decision."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from node.methods import losses
from node.policies import lean
from node.policies.presets import TinyRecipe
from swarm.errors import ConfigError

BOS, EOS, PAD, ANSWER = "<bos>", "<eos>", "<pad>", "<answer>"

Pair = tuple[str, str]  # prompt, one correct answer
Progress = Callable[[float, str], None]  # share done in [0, 1], one line about it


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and four special tokens; a prompt becomes `<bos> bytes <answer>`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([BOS, EOS, PAD, ANSWER])
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {ANSWER}",
        special_tokens=[(BOS, core.token_to_id(BOS)), (ANSWER, core.token_to_id(ANSWER))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[ANSWER],
        clean_up_tokenization_spaces=False,
    )


def blank_model(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights from the recipe's seed; the caller's global generator is left alone."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        head_dim=recipe.head_size,
        max_position_embeddings=recipe.context_tokens,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_sliding_window=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def make_tiny(
    pairs: Iterator[Pair],
    directory: Path,
    progress: Progress,
    recipe: TinyRecipe = TinyRecipe(),  # noqa: B008 - frozen
) -> float:
    """Warm a fresh tiny model on `pairs` and save it, tokenizer included, into `directory`. Returns
    the share of answers that sampling would get right, estimated on the last batches (a lower bound
    where a task has several answers). ConfigError: pairs ended early, or one is too long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        transformers_logging.disable_progress_bar()
        tokenizer = byte_tokenizer()
        model = blank_model(recipe, tokenizer)
        competence = _warm_up(model, tokenizer, pairs, recipe, progress)
        directory.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return competence
    finally:
        torch.set_num_threads(threads)


def _warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Iterator[Pair],
    recipe: TinyRecipe,
    progress: Progress,
) -> float:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    competence = 0.0
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe)
        batch = _draw(pairs, recipe.batch, tokenizer, recipe.context_tokens)
        loss, sampled_right = _loss(model, batch, tokenizer, recipe.prompt_loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        competence += (sampled_right - competence) / min(step + 1, 20)
        progress((step + 1) / recipe.steps, f"sampled right: {competence:.0%}")
        if step >= recipe.ramp_steps and competence >= recipe.target:
            break
    progress(1.0, f"sampled right: {competence:.0%}")
    return competence


def _schedule(step: int, recipe: TinyRecipe) -> float:
    ramp = min(1.0, (step + 1) / recipe.ramp_steps)
    return ramp * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))


def _draw(
    pairs: Iterator[Pair], count: int, tokenizer: PreTrainedTokenizerFast, context_tokens: int
) -> list[tuple[list[int], list[int]]]:
    batch = []
    for _ in range(count):
        pair = next(pairs, None)
        if pair is None:
            raise ConfigError("the tiny preset ran out of (prompt, answer) pairs to warm up on")
        prompt = tokenizer(pair[0])["input_ids"]
        answer = tokenizer(pair[1], add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        if len(prompt) + len(answer) > context_tokens:
            raise ConfigError(
                f"a prompt of {len(prompt)} bytes does not fit the tiny preset's context of "
                f"{context_tokens}: choose smaller task settings"
            )
        batch.append((prompt, answer))
    return batch


def _loss(
    model: Qwen3ForCausalLM,
    batch: Sequence[tuple[list[int], list[int]]],
    tokenizer: PreTrainedTokenizerFast,
    prompt_loss: float,
) -> tuple[torch.Tensor, float]:
    """The weighted loss of a batch, and the mean probability of sampling a whole answer."""
    network = lean.LeanModel(model)
    loss, sampled_right = torch.zeros(()), 0.0
    for members in lean.alike([prompt for prompt, _ in batch]):
        pairs = [batch[index] for index in members]
        part, right = _kind_loss(network, pairs, tokenizer.pad_token_id, prompt_loss)
        loss = loss + part / len(batch)
        sampled_right += right / len(batch)
    return loss, sampled_right


def _kind_loss(
    network: lean.LeanModel,
    pairs: Sequence[tuple[list[int], list[int]]],
    fill: int,
    prompt_loss: float,
) -> tuple[torch.Tensor, float]:
    """Summed losses of prompts that begin alike; what they have in common is run once."""
    shared = min(
        lean.common_length([prompt for prompt, _ in pairs]),
        min(len(prompt) for prompt, _ in pairs) - 1,
    )
    above = []
    if shared:
        common = torch.tensor([[pairs[0][0][:shared]]])
        above = [lean.as_segment(network.run(common, torch.zeros(1, dtype=torch.long))[1])]
    ids, _ = lean.pad_right([prompt[shared:] + answer for prompt, answer in pairs], fill)
    weights, answers = torch.zeros(ids.shape), torch.zeros(ids.shape)
    for row, (prompt, answer) in enumerate(pairs):
        begin, end = len(prompt) - shared, len(prompt) - shared + len(answer)
        weights[row, :begin] = prompt_loss / begin
        weights[row, begin:end] = 1.0 / len(answer)
        answers[row, begin:end] = 1.0
    hidden, _ = network.run(ids[None, :, :-1], torch.tensor([shared]), above)
    logprobs = losses.token_logprobs(network.logits(hidden[0]), ids[:, 1:])
    loss = -(logprobs * weights[:, 1:]).sum()
    return loss, float((logprobs.detach() * answers[:, 1:]).sum(dim=1).exp().sum())
