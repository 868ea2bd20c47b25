"""What holds of a bounded table whatever is done with it."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarm.limits.address_blocks import OriginPath
from swarm.limits.bounded_table import BoundedTable

TOTAL_MAX = 6
SHARES = {1: 5, 2: 3}
PATHS: list[OriginPath] = [(), ("a",), ("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
PUT = st.tuples(st.just("put"), st.integers(0, 12), st.sampled_from(PATHS))
OTHER = st.tuples(st.sampled_from(["use", "pop"]), st.integers(0, 12), st.just(()))
STEPS = st.lists(PUT | PUT | OTHER, max_size=60)


def share_of(path: OriginPath) -> int | None:
    return SHARES[len(path)]


@given(steps=STEPS, newest_first=st.booleans(), is_ranked=st.booleans())
def test_no_limit_is_passed_and_what_goes_is_of_the_greediest(
    steps: list[tuple[str, int, OriginPath]], newest_first: bool, is_ranked: bool
) -> None:
    def rank_of(key: int, _: object) -> int:
        return key % 2 if is_ranked else 0

    table: BoundedTable[int, OriginPath] = BoundedTable(
        TOTAL_MAX, limit_of=share_of, rank_of=rank_of, newest_first=newest_first
    )
    kept: dict[int, OriginPath] = {}
    for what, key, path in steps:
        if what == "pop":
            assert table.pop(key) == kept.pop(key, None)
        elif what == "use":
            assert table.use(key) == kept.get(key)
            if key in kept:
                kept[key] = kept.pop(key)
        else:
            kept.pop(key, None)
            kept[key] = path
            gone = table.put(key, path, path)
            if gone is not None:
                candidates = [each for each in kept if kept[each][: len(gone.path)] == gone.path]
                low = min(rank_of(each, None) for each in candidates)
                candidates = [each for each in candidates if rank_of(each, None) == low]
                assert gone.key in candidates
                sizes = Counter(kept[each][: len(gone.path) + 1] for each in candidates)
                sizes[gone.path] = min(1, sizes[gone.path])  # no origin of their own: one by one
                assert sizes[kept[gone.key][: len(gone.path) + 1]] == max(sizes.values())
                del kept[gone.key]
        assert list(table.items()) == list(kept.items())
        assert len(table) <= TOTAL_MAX
        sizes = Counter(
            path[:length] for path in kept.values() for length in range(1, 3) if len(path) >= length
        )
        assert all(size <= SHARES[len(path)] for path, size in sizes.items())
        assert all(table.size_of(path) == sizes[path] for path in PATHS if path)
        assert sorted(table.spread(99, Random(1))) == sorted(kept)
