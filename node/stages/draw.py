"""The draw of others' groups."""

from collections.abc import Sequence

from node.methods.filters import ByNeed
from node.methods.samplers import distinct, draw_foreign, draw_needed
from node.stages.stage import Stage, View
from swarm.exchange.pool import Candidate
from swarm.rollouts import GroupId


class DrawByNeed(Stage[ByNeed]):
    """Draw by how often the node solves such tasks itself."""

    async def draw(
        self, candidates: Sequence[Candidate], wanted: int, each_max: int, at: View
    ) -> list[GroupId] | None:
        assert at.exchange is not None
        times, rng = self.set_to.looked_at, at.rng("draw")
        looked = draw_foreign(candidates, times * wanted, rng, times * each_max)
        said = distinct(await at.exchange.look(looked))
        tasks = {each.group_id: each.group.task for each in said}
        found = [each for each in candidates if each.group_id in tasks]
        passes = [at.choice.own_pass_rate(tasks[each.group_id]) for each in found]
        chosen = draw_needed(found, passes, wanted, rng, self.set_to, each_max)
        self.acted += len(chosen)
        return chosen
