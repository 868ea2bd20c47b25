"""Lease books to test, and what workers do with them."""

import msgpack

from swarm.leases.known_workers import CreditLimit, KnownWorker
from swarm.leases.lease_table import Lease, LeaseBook, LeaseRules, SubmittedGroup
from swarm.leases.staleness import Account, StalenessRules

STALENESS = StalenessRules(bound=2, groups_per_step=8, groups_max=64)
PATIENT = StalenessRules(bound=1000, groups_per_step=8, groups_max=64)
RULES = LeaseRules(target_s=60.0, first_s=10.0, first_groups=4, slack=3.0, groups_max=32)
SECRET = b"a secret of the learner's"


def open_book(
    rules: LeaseRules = RULES, staleness: StalenessRules = STALENESS, **changed
) -> LeaseBook:
    settings = {"run_id": "run", "secret": SECRET, "start": 1, **changed}
    return LeaseBook(rules, Account(staleness), **settings)


def granted(book: LeaseBook, worker: str = "w", version: int = 0, now: float = 0.0) -> Lease:
    lease = book.request(worker, version, now)
    assert isinstance(lease, Lease), lease
    return lease


def prove(book: LeaseBook, *workers: str, credits: float = 64.0) -> None:
    """Workers that are on trial no more."""
    for worker in workers:
        book._workers[worker] = KnownWorker(limit=CreditLimit(credits))


def group_of(lease: Lease, place: int, versions=(0,), **changed) -> SubmittedGroup:
    seed = lease.seeds[place]
    submission = {
        "lease_id": lease.lease_id,
        "worker": lease.worker,
        "seed": seed,
        "group_id": seed.to_bytes(8, "big"),
        "versions": tuple(versions),
    }
    return SubmittedGroup(**{**submission, **changed})


def deliver(book: LeaseBook, lease: Lease, now: float, versions=(0,)) -> None:
    for place in range(lease.groups):
        assert book.submit(group_of(lease, place, versions), now).admitted


def restored(book: LeaseBook, now: float, later: float, start: int = 2) -> LeaseBook:
    record = msgpack.unpackb(msgpack.packb(book.to_record(now)), strict_map_key=False)
    return LeaseBook.from_record(
        record,
        rules=RULES,
        staleness_rules=STALENESS,
        run_id="run",
        secret=SECRET,
        start=start,
        now=later,
    )
