"""Completions from drafts: the policy keeps what it would still say and continues from there.

Log-probs of the kept tokens are the present policy's (SPEC-RL, arXiv 2509.23232).
"""

from collections import deque
from collections.abc import Sequence

import torch

from node.engines.torch_engine import (
    LOGITS_MAX,
    Batch,
    Decoder,
    Generation,
    SampledRow,
    batches_of,
    in_batches,
    open_decoder,
    uniforms_of,
)
from node.interfaces.engine import Sampling, extend_spans
from node.methods.drafts import Draft
from node.methods.generation import Speculative, speculative
from node.policies.policy import Policy
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason, Spans

_KEEPING = "keep"  # its random numbers are others than those that tokens are drawn by


class DraftGeneration(Generation):
    """One completion of each draft, for `Engine.redraft`.

    Drafts that fit in a batch are scored together, sharing prompts; then their kept tokens are
    continued, and the next drafts follow.
    """

    def __init__(
        self,
        policy: Policy,
        drafts: Sequence[Draft],
        set_to: Speculative,
        sampling: Sampling,
        seed: int,
    ) -> None:
        if not sampling.is_whole:
            raise ConfigError("drafts are weighed by the whole distribution: set top_p to 1")
        self._drafts, self._set_to = tuple(drafts), set_to
        super().__init__(policy, [each.prompt for each in drafts], 1, sampling, seed)

    def _begin(self) -> None:
        tokens_max = self._sampling.max_new_tokens
        drawn = uniforms_of(self._prompts, 1, tokens_max, self._seed)
        self._rows = [SampledRow(at, uniforms, 0) for at, uniforms in enumerate(drawn)]
        self._keeping = uniforms_of(self._prompts, 1, tokens_max, self._seed, _KEEPING)
        self._kept: list[list[float]] = [[] for _ in self._drafts]  # log-probs of what is kept
        self._kept_versions = [0] * len(self._drafts)
        self._batches = deque()
        # Twice: rejected draft tokens stay in the cache while kept ones are continued.
        passes = batches_of(self._policy, self._encoded, self._rows, 2 * tokens_max)
        self._unweighed = deque([row.owner for row in rows] for rows in passes)

    @property
    def done(self) -> bool:
        return not self._batches and not self._unweighed

    def advance(self, steps: int, policy_version: int) -> None:
        """As `Generation.advance`. Scoring a batch of drafts counts as one step."""
        if self._version is not None and policy_version < self._version:
            self._begin()
        self._version = policy_version
        if not self._batches and self._unweighed:
            with torch.inference_mode(), self._policy.autocast():
                self._weigh(self._unweighed.popleft(), policy_version)
            steps -= 1
        super().advance(steps, policy_version)

    def _weigh(self, places: Sequence[int], policy_version: int) -> None:
        """Find the kept tokens of some drafts, and set up their continuation."""
        cut = [self._cut(at) for at in places]
        decoder: Decoder | None = None
        if any(cut):
            prompts: dict[tuple[int, ...], int] = {}
            owners = [prompts.setdefault(tuple(self._encoded[at]), len(prompts)) for at in places]
            room = 2 * self._sampling.max_new_tokens
            decoder = open_decoder(self._policy, [list(ids) for ids in prompts], owners, room)
            for at, now in zip(places, self._weighed(decoder, cut), strict=True):
                old, drawn = self._drafts[at].logprobs[: len(now)], self._keeping[at].tolist()
                self._kept[at] = now[: speculative(old, now, drawn, self._set_to)]
                self._kept_versions[at] = policy_version
        self._go_on(places, decoder)

    def _weighed(self, decoder: Decoder, drafts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probs of the drafts' tokens under the present policy at the sampling temperature.
        Logits are computed for some tokens at a time."""
        longest = max(map(len, drafts))
        padded = [[*ids, *[self._policy.eos_id] * (longest - len(ids))] for ids in drafts]
        tokens = torch.tensor(padded, device=self._policy.device)
        found = [self._logprobs(decoder.logits[:, None], tokens[:, :1])]
        width = max(1, LOGITS_MAX // (len(drafts) * self._policy.vocabulary))
        for first in range(1, longest, width):
            last = min(first + width, longest)
            logits = decoder.foretold(tokens[:, first - 1 : last - 1])
            found.append(self._logprobs(logits, tokens[:, first:last]))
        rows = torch.cat(found, dim=1).tolist()  # causal: pads change nothing before them
        return [row[: len(ids)] for row, ids in zip(rows, drafts, strict=True)]

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs of tokens (rows, C), given the logits (rows, C, V) before them."""
        scaled = (logits.double() / self._sampling.temperature).log_softmax(-1)
        return scaled.gather(-1, tokens[..., None]).squeeze(-1)

    def _go_on(self, places: Sequence[int], decoder: Decoder | None) -> None:
        """Set up batches that continue the kept tokens, with the same decoder if it can rewind."""
        owners: dict[tuple[int, ...], int] = {}
        running: list[tuple[int, SampledRow]] = []
        for number, at in enumerate(places):
            length = len(self._kept[at])
            prefix = (*self._encoded[at], *self._drafts[at].token_ids[:length])
            room = self._sampling.max_new_tokens - length
            room = min(room, self._policy.context_tokens - len(prefix))
            row = self._rows[at]
            row.limit = 0 if length and prefix[-1] in self._policy.eos_ids else room
            if row.running:
                row.owner = owners.setdefault(prefix, len(owners))
                running.append((number, row))
        if not running:
            return
        prefixes = [list(prefix) for prefix in owners]
        rows = [row for _, row in running]
        numbers = [number for number, _ in running]
        kept = [len(self._kept[places[number]]) for number in numbers]
        last = [prefixes[row.owner][-1] for row in rows]
        if decoder is not None and decoder.rewind(numbers, kept, last):
            batch = Batch(self._policy, prefixes, rows, self._sampling, decoder)
            self._batches = deque([batch])
        else:
            self._batches = in_batches(self._policy, prefixes, rows, self._sampling)

    def _cut(self, place: int) -> tuple[int, ...]:
        """The draft's tokens up to the limit of sampling and of the context."""
        room = self._policy.context_tokens - len(self._encoded[place])
        return self._drafts[place].token_ids[: min(self._sampling.max_new_tokens, room)]

    def completions(self) -> list[tuple[Completion, ...]]:
        """One group of one completion for each draft. Its splice is where the kept prefix ends."""
        found: list[tuple[Completion, ...]] = []
        for row, draft, kept, version in zip(
            self._rows, self._drafts, self._kept, self._kept_versions, strict=True
        ):
            tokens = [*draft.token_ids[: len(kept)], *row.tokens]
            spans = _after(kept, version, row.spans)
            ended = bool(tokens) and tokens[-1] in self._policy.eos_ids
            found.append(
                (
                    Completion(
                        text=self._policy.text_of(self._prompts[row.owner], tokens),
                        token_ids=tuple(tokens),
                        logprobs=(*kept, *row.logprobs),
                        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                        policy_version=spans[0][0],
                        spans=spans if len(spans) > 1 else (),
                        splices=(len(kept),) if kept else (),
                    ),
                )
            )
        return found


def _after(kept: Sequence[float], version: int, spans: Sequence[tuple[int, int]]) -> Spans:
    """The version spans of kept and sampled tokens."""
    found: list[tuple[int, int]] = []
    for made_by, count in ((version, len(kept)), *spans):
        extend_spans(found, made_by, count)
    return tuple(found)
