"""Completions from drafts: the policy of now keeps what it would still say, and goes on from there.

What was kept has the log-probs of the policy of now, like what follows (SPEC-RL, arXiv 2509.23232).
"""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from node.engines.torch_engine import LOGITS_MAX, Generation, SampledRow, in_batches, uniforms_of
from node.interfaces.engine import Sampling
from node.methods.generate.drafts import Draft
from node.methods.generate.speculative import Speculative, speculative
from node.policies.lean import pad_right
from node.policies.policy import Policy
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason, Spans

_WIDTH_MIN = 16  # tokens of each draft in one part, however large the vocabulary is
_KEEPING = "keep"  # its random numbers are others than those that tokens are drawn by


class DraftGeneration(Generation):
    """One completion of each draft; see `DraftingEngine.redraft`. Drafts are weighed in the first
    segment, and once more where an older version is loaded."""

    def __init__(
        self,
        policy: Policy,
        drafts: Sequence[Draft],
        set_to: Speculative,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """Computes nothing yet.

        Raises:
            ConfigError: as `Generation`; or not every token may be sampled, so that log-probs are
                of another distribution than the policy's.
        """
        if not sampling.is_whole:
            raise ConfigError("drafts are weighed by the whole distribution: set top_p to 1")
        self._drafts, self._set_to = tuple(drafts), set_to
        super().__init__(policy, [each.prompt for each in drafts], 1, sampling, seed)

    def _begin(self) -> None:
        self._batches, self._rows = deque(), []
        self._kept: list[list[float]] | None = None  # log-probs of what is kept of each draft
        self._found: list[list[float]] = [[] for _ in self._drafts]  # of whole drafts
        self._passes = deque(self._in_passes())

    @property
    def done(self) -> bool:
        """Whether every completion has ended."""
        return self._kept is not None and not self._batches

    def weights_changed(self) -> None:
        """See `Generation.weights_changed`; drafts that are being weighed are weighed anew."""
        super().weights_changed()
        if self._kept is None:
            self._begin()

    def advance(self, steps: int, policy_version: int) -> None:
        """See `Generation.advance`. First, one pass over some of the drafts is a segment."""
        if self._version is not None and policy_version < self._version:
            self._begin()
        self._version = policy_version
        if self._passes:
            with torch.inference_mode(), self._policy.autocast():
                self._weigh(self._passes.popleft())
            if self._passes:
                return
        if self._kept is None:
            self._kept_version = policy_version
            self._keep()
        super().advance(steps, policy_version)

    def _keep(self) -> None:
        """Find out what is kept, and set rows up for what is to follow. Rows with the same prompt
        and nothing kept share that prompt."""
        tokens_max = self._sampling.max_new_tokens
        uniforms = uniforms_of(self._prompts, 1, tokens_max, self._seed, _KEEPING)
        self._kept = []
        for draft, now, drawn in zip(self._drafts, self._found, uniforms, strict=True):
            old = draft.logprobs[: len(now)]
            self._kept.append(now[: speculative(old, now, drawn.tolist(), self._set_to)])
        owners: dict[tuple[int, ...], int] = {}
        uniforms = uniforms_of(self._prompts, 1, tokens_max, self._seed)
        self._rows = []
        for place, kept in enumerate(map(len, self._kept)):
            prefix = (*self._encoded[place], *self._drafts[place].token_ids[:kept])
            ended = kept > 0 and prefix[-1] in self._policy.eos_ids
            room = min(tokens_max - kept, self._policy.context_tokens - len(prefix))
            owner = owners.setdefault(prefix, len(owners))
            self._rows.append(SampledRow(owner, uniforms[place], 0 if ended else room))
        running = [row for row in self._rows if row.running]
        self._batches = in_batches(
            self._policy, [list(prefix) for prefix in owners], running, self._sampling
        )

    def _weigh(self, places: Sequence[int]) -> None:
        """Log-probs of some drafts' tokens, as far as the limits allow them, under the policy of
        now, at the temperature of sampling. Logits are there for some tokens at a time."""
        texts = [[*self._encoded[at], *self._cut(at)] for at in places]
        ids, _ = pad_right(texts, self._policy.eos_id)  # causal: pads change nothing before
        ids = ids.to(self._policy.device)
        begin = (
            min(len(self._encoded[at]) for at in places) - 1
        )  # foretells the first draft's first
        end = ids.shape[1] - 1
        width = end - begin
        if not self._policy.stateful:  # whose state is no cache that we know
            width = max(_WIDTH_MIN, self._logits_max // len(places))
        cache = None if self._policy.stateful else DynamicCache()
        if cache is not None and begin > 0:
            body = getattr(self._policy.model, self._policy.model.base_model_prefix)
            body(input_ids=ids[:, :begin], past_key_values=cache, use_cache=True)
        for first in range(begin, end, max(1, width)):
            last = min(first + width, end)
            logits = self._logits(ids, first, last, cache)
            for row, at in enumerate(places):
                self._note(at, logits[row], first, last)

    def _logits(
        self, ids: torch.Tensor, first: int, last: int, cache: DynamicCache | None
    ) -> torch.Tensor:
        """After the tokens from `first` to before `last`: (rows, last - first, V)."""
        if cache is None:
            kept = self._policy.logits_kept(last - first)
            out = self._policy.model(input_ids=ids[:, :last], use_cache=False, **kept)
        else:
            part = ids[:, first:last]
            out = self._policy.model(input_ids=part, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = out.logits[:, -(last - first) :]
        return logits

    def _note(self, place: int, logits: torch.Tensor, first: int, last: int) -> None:
        """Take in what is foretold of one draft after the tokens from `first` to before `last`."""
        tokens, skipped = self._cut(place), len(self._encoded[place]) - 1
        here = range(max(first, skipped), min(last, skipped + len(tokens)))
        if here:
            values = logits[here.start - first : here.stop - first].double()
            values = (values / self._sampling.temperature).log_softmax(-1)
            chosen = torch.tensor(tokens[here.start - skipped : here.stop - skipped])
            chosen = chosen.to(values.device)[:, None]
            self._found[place] += values.gather(-1, chosen).squeeze(-1).tolist()

    def _cut(self, place: int) -> tuple[int, ...]:
        """A draft's tokens, as many as may be sampled and fit."""
        room = self._policy.context_tokens - len(self._encoded[place])
        return self._drafts[place].token_ids[: min(self._sampling.max_new_tokens, room)]

    @property
    def _logits_max(self) -> int:
        """Tokens that have logits at a time."""
        vocabulary: int = self._policy.model.config.get_text_config().vocab_size
        return max(1, LOGITS_MAX // vocabulary)

    def _in_passes(self) -> Iterator[list[int]]:
        """Places of drafts that are run together, of similar lengths."""
        drafted = [at for at in range(len(self._drafts)) if self._cut(at)]
        passing: list[int] = []
        longest = 0
        for at in sorted(drafted, key=lambda at: (len(self._encoded[at]), at)):
            length = len(self._encoded[at]) + len(self._cut(at))
            if passing and (len(passing) + 1) * max(longest, length) > self._logits_max:
                yield passing
                passing, longest = [], 0
            passing.append(at)
            longest = max(longest, length)
        if passing:
            yield passing

    def completions(self) -> list[tuple[Completion, ...]]:
        """One group of one completion for each draft. A prefix that was kept ends at its splice."""
        assert self._kept is not None
        found: list[tuple[Completion, ...]] = []
        for row, draft, kept in zip(self._rows, self._drafts, self._kept, strict=True):
            tokens = [*draft.token_ids[: len(kept)], *row.tokens]
            spans = _after(kept, self._kept_version, row.spans)
            ended = bool(tokens) and tokens[-1] in self._policy.eos_ids
            found.append(
                (
                    Completion(
                        text=self._policy.decode(tokens),
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
    """The versions of what was kept and of what was sampled."""
    if not kept:
        return tuple(spans)
    if spans and spans[0][0] == version:
        return ((version, len(kept) + spans[0][1]), *spans[1:])
    return ((version, len(kept)), *spans)
