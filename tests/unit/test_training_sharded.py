"""What several ranks decide without each other: who computes what, and what there is room for."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.interfaces.trainer_spec import TrainerSpec
from node.train.memory import plan
from node.train.ranks import Ranks
from node.train.sharded_trainer import dealt
from node.train.trainer_worker import THREADS_DEFAULT_MAX, threads
from tests.unit.training_support import qwen_directory


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 8))
def test_every_row_is_dealt_once_and_no_hand_gets_much_more(lengths, hands):
    shares = dealt(lengths, hands)
    assert sorted(place for share in shares for place in share) == list(range(len(lengths)))
    totals = [sum(lengths[place] for place in share) for share in shares]
    assert max(totals) - min(totals) <= max(lengths, default=0)


def test_ranks_share_the_states_and_on_the_cpu_the_memory(tmp_path, monkeypatch):
    spec = TrainerSpec(str(qwen_directory(tmp_path)), device="cpu")
    alone, four = plan(spec), plan(spec, Ranks(0, 4, 0, 1))
    assert four.estimate_bytes < alone.estimate_bytes
    monkeypatch.setattr("node.train.memory.free_bytes", lambda _: 8_000_000_000)
    whole, shared = plan(spec, Ranks(0, 4, 0, 1)), plan(spec, Ranks(0, 4, 0, 4))
    assert shared.available_bytes == whole.available_bytes // 4


@pytest.mark.parametrize("cores", [1, 2, 9, 200])
def test_ranks_of_one_machine_share_its_threads(monkeypatch, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert threads(3, processes=8) == 3  # as asked for
    assert threads(0, processes=8) == max(1, min((cores - 1) // 8, THREADS_DEFAULT_MAX))
    assert threads(0) == max(1, min(cores - 1, THREADS_DEFAULT_MAX))
