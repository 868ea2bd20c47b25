"""Completions from drafts: the policy keeps what it would still say and continues from there.

Log-probs of the kept tokens are the present policy's (SPEC-RL, arXiv 2509.23232).
"""

from collections import deque
from collections.abc import Sequence

from node.engines.torch_engine import (
    Batch,
    Decoder,
    Generation,
    SampledRow,
    batches_of,
    decoder_of,
    foretell,
    in_batches,
    uniforms_of,
)
from node.interfaces.engine import Request, Sampling
from node.methods.drafts import Draft
from node.methods.generation import Speculative, speculative
from node.policies.policy import Policy
from swarm.errors import ConfigError

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
        super().__init__(policy, [Request(each.prompt) for each in drafts], sampling, seed)

    def _begin(self) -> None:
        super()._begin()
        tokens_max = self._sampling.max_new_tokens
        self._keeping = uniforms_of(self._requests, tokens_max, self._seed, _KEEPING)
        self._batches = deque()
        # Twice: rejected draft tokens stay in the cache while kept ones are continued.
        passes = batches_of(self._policy, self._encoded, self._rows, 2 * tokens_max)
        self._unweighed = deque([row.owner for row in rows] for rows in passes)

    def _weigh(self, places: Sequence[int], policy_version: int) -> None:
        """Find the kept tokens of some drafts, and set up their continuation."""
        begun = [self._beginnings[at] for at in places]
        for at, row in zip(places, begun, strict=True):
            row.tokens = self._cut(at)
        decoder: Decoder | None = None
        if any(row.tokens for row in begun):
            room = 2 * self._sampling.max_new_tokens
            decoder = decoder_of(self._policy, [self._encoded[at] for at in places], room)
            foretell(self._policy, decoder, begun)
            for at, row in zip(places, begun, strict=True):
                old = self._drafts[at].logprobs[: len(row.tokens)]
                drawn = self._keeping[at].tolist()
                kept = speculative(old, row.logprobs, drawn, self._set_to)
                del row.tokens[kept:], row.logprobs[kept:]
                row.credit(policy_version)
        self._go_on(places, decoder)

    def _go_on(self, places: Sequence[int], decoder: Decoder | None) -> None:
        """Set up batches that continue the kept tokens, with the same decoder if it can rewind."""
        owners: dict[tuple[int, ...], int] = {}
        running: list[tuple[int, SampledRow]] = []
        for number, at in enumerate(places):
            begun = self._beginnings[at].tokens
            length, prefix = len(begun), (*self._encoded[at], *begun)
            room = self._sampling.max_new_tokens - length
            room = min(room, self._policy.context_tokens - len(prefix))
            row = self._rows[at]
            row.limit = 0 if length and prefix[-1] in self._policy.eos_ids else room
            if row.thought is not None:
                row.thought.begun = tuple(begun)
            if row.running:
                row.owner = owners.setdefault(prefix, len(owners))
                running.append((number, row))
        if not running:
            return
        prefixes = [list(prefix) for prefix in owners]
        rows = [row for _, row in running]
        numbers = [number for number, _ in running]
        kept = [len(self._beginnings[places[number]].tokens) for number in numbers]
        last = [prefixes[row.owner][-1] for row in rows]
        if decoder is not None and decoder.rewind(numbers, kept, last):
            batch = Batch(self._policy, prefixes, rows, self._sampling, decoder)
            self._batches = deque([batch])
        else:
            self._batches = in_batches(self._policy, prefixes, rows, self._sampling)

    def _cut(self, place: int) -> list[int]:
        """The draft's tokens up to the limit of sampling and of the context."""
        room = self._policy.context_tokens - len(self._encoded[place])
        return list(self._drafts[place].token_ids[: min(self._sampling.max_new_tokens, room)])
