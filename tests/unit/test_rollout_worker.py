"""What a worker without work says of it."""

from node.loops.rollout_worker import IN_WORDS, NOTE_AFTER_S, IdleNote
from swarm.leasing.intake import STANDBY
from swarm.leasing.staleness import Denial


def test_each_reason_of_a_learner_has_words() -> None:
    assert set(IN_WORDS) == {*Denial, STANDBY}
    assert not any("_" in words for words in IN_WORDS.values())


def test_a_worker_that_is_sent_away_for_moments_is_not_told_of() -> None:
    note = IdleNote()
    busy = [note.look("so" if s % 5 else None, 0, float(s)) for s in range(60)]
    begun = [note.look("so", s // 4, float(s)) for s in range(60, 120)]  # works between two looks
    assert set(busy + begun) == {None}


def test_a_worker_that_gets_no_work_says_so_until_it_does() -> None:
    note = IdleNote()
    assert note.look("so", 0, 10.0) is None
    assert note.look("so", 0, 10.0 + NOTE_AFTER_S - 0.1) is None
    assert note.look("so", 0, 10.0 + NOTE_AFTER_S) == "no work: so"
    assert note.look("else", 0, 11.0 + NOTE_AFTER_S) == "no work: else"
    assert note.look(None, 0, 12.0 + NOTE_AFTER_S) is None
    assert note.look("so", 0, 13.0 + NOTE_AFTER_S) is None
