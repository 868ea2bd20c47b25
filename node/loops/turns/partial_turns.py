"""Rounds that do not wait for transcripts of many turns (`partial_rollouts.py`, for turns).

A round has more groups under way than it needs, and takes the first that are done. The others stop
between two turns, and go on in the next round under the policy of then: each of their turns is of
one policy version, and says of which. A turn that was begun is waited for.
"""

from math import ceil

from node.interfaces.engine import Sampling
from node.loops.partial_rollouts import Assign, Made
from node.loops.turns.play import Played, Player, seed_of_turn
from node.verification.held_out import Assignment


class PartialTurns:
    """Groups that earlier rounds began. They are lost with the process; their tasks are then left
    out. At most `excess` times a round's groups are under way at once."""

    def __init__(self, player: Player, excess: float) -> None:
        """`excess`: groups that a round has under way at first, over those that it needs; at least
        1."""
        assert excess >= 1.0
        self._player = player
        self._excess = excess
        self._begun: list[tuple[Assignment, Played]] = []  # the oldest first

    @property
    def waiting(self) -> int:
        """Groups that are begun and not done."""
        return len(self._begun)

    async def groups(
        self, wanted: int, completions_each: int, sampling: Sampling, seed: int, assign: Assign
    ) -> list[Made]:
        """The next `wanted` groups that get done. `assign` gives so many further tasks.

        Raises:
            ChildFailed, ConfigError: as `play.completions`; what was begun is kept.
        """
        new = ceil(self._excess * wanted) - len(self._begun)
        if new > 0:
            assigned = await assign(new)
            tasks, prompts = [each.task for each in assigned], [each.prompt for each in assigned]
            played = await self._player.begin(tasks, prompts, completions_each, sampling, seed)
            self._begun += zip(assigned, played, strict=True)
        turn = 0
        while sum(not each.open_rows for _, each in self._begun) < wanted:
            turn += 1
            groups = [each for _, each in self._begun]
            await self._player.go_on(groups, sampling, seed_of_turn(seed, turn))
        done = [pair for pair in self._begun if not pair[1].open_rows][:wanted]
        self._begun = [pair for pair in self._begun if pair not in done]
        return [(assignment, each.completions()) for assignment, each in done]
