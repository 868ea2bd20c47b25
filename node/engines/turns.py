"""The next turns of transcripts, sampled with torch in one batch."""

from collections.abc import Sequence

from node.engines.torch_engine import Generation
from node.interfaces.engine import NO_TURN, Context, Sampling
from node.policies.policy import Policy
from swarm.rollouts import Completion


class TurnGeneration(Generation):
    """A turn of each context, each with a limit of its own; see `RolloutEngine.go_on`."""

    def __init__(
        self, policy: Policy, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> None:
        """Computes nothing yet.

        Raises:
            ConfigError: the policy's chat template has no turns, or the sampling makes no sense.
        """
        encoded = [policy.encode_turns(each.prompt, each.turns) for each in contexts]
        limits = [
            min(each.tokens_max, policy.context_tokens - len(ids))
            for each, ids in zip(contexts, encoded, strict=True)
        ]
        self._places = [at for at, limit in enumerate(limits) if limit > 0]
        self._contexts = len(contexts)
        super().__init__(
            policy,
            # random numbers are drawn by these: other ones in each turn
            [f"{contexts[at].prompt}\x1f{len(contexts[at].turns)}" for at in self._places],
            1,
            sampling,
            seed,
            [(encoded[at], limits[at]) for at in self._places],
        )

    def completions(self) -> list[tuple[Completion, ...]]:
        """One group of one completion for each context."""
        found = [(NO_TURN,)] * self._contexts
        for at, (completion,) in zip(self._places, super().completions(), strict=True):
            found[at] = (completion,)
        return list(found)
