"""What a node learns depends on others only through the groups that it says it trained on."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.nodes import MakeNode
from tests.integration.replay import curve, replayed, settings_of

pytestmark = pytest.mark.integration

ROUNDS = 6


@pytest.mark.long
def test_a_loss_curve_comes_out_again_of_the_groups_alone(
    make_node: MakeNode, tmp_path: Path
) -> None:
    first = make_node("a").start()
    other = make_node("b", "--peer", first.address()).start()
    first.until(lambda: first.last_round() >= ROUNDS and first.foreign_trained() >= 4)
    assert [first.interrupt(), other.interrupt()] == [0, 0]
    told = first.rounds()
    again = replayed(settings_of(first), told, tmp_path)
    assert curve(again) == curve(told)

    # Negative control: one group less in an early round, and nothing after it is the same
    early = next(n for n, each in enumerate(told) if each.foreign_groups)
    less = [*told]
    less[early] = replace(told[early], foreign_groups=told[early].foreign_groups[1:])
    other_curve = curve(replayed(settings_of(first), less, tmp_path))
    assert all(a != b for a, b in zip(other_curve[early:], curve(told)[early:], strict=True))
    assert other_curve[:early] == curve(told)[:early]
