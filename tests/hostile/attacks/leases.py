"""Attacks of free keys on a learner: take its leases, and deliver nothing, or nonsense."""

import secrets
from contextlib import suppress
from functools import partial

import trio

from swarm.errors import RemoteProtocolError
from swarm.identity import Identity
from swarm.wire import codec
from swarm.wire.messages import (
    LEASE_REPLY_BYTES_MAX,
    LEASES_PROTOCOL,
    REPORTS_PROTOCOL,
    SUBMISSIONS_PROTOCOL,
    LeaseReply,
    WantReport,
)
from tests.hostile.attack import (
    Assault,
    admitting,
    attack,
    connected,
    over_and_over,
    side_by_side,
    tried,
)
from tests.hostile.messages import spoiled, want_lease
from tests.hostile.wire import FAILURES, Mux

KEYS = 30
on_a_learner = partial(attack, target="learner", seconds_min=45.0)  # until its pace shows


async def ask_lease(assault: Assault, mux: Mux) -> LeaseReply | None:
    """Ask for a lease as a worker would that has the newest version."""
    wanted = want_lease(assault.run_id, int(assault.extra.get("version", 1)))
    answer = await mux.request(LEASES_PROTOCOL, wanted)
    if answer is None:
        return None
    with suppress(RemoteProtocolError):
        lease = codec.decode(answer, LeaseReply, LEASE_REPLY_BYTES_MAX)
        assault.extra["version"] = lease.learner_version
        return lease
    return None


async def take_leases(assault: Assault, key: Identity, most: int) -> None:
    """Take leases under one key, until cut off or so many were asked for."""
    async with assault.admitted(0, key) as mux:
        for _ in range(most):
            lease = await ask_lease(assault, mux)
            if lease is not None:
                assault.spent.count("groups leased", lease.groups)
                if not lease.groups:
                    assault.spent.count(f"denied: {lease.reason}"[:60])
            await trio.sleep(0.7)
            if mux.over.is_set():
                return


@on_a_learner("40 requests a second", "30 keys of one address")
async def keys_that_never_deliver(assault: Assault) -> None:
    """Thirty workers that take what they get and do nothing."""

    async def one(_: int) -> None:
        key = assault.key()
        await over_and_over(assault, lambda _: take_leases(assault, key, 10_000), 1.0)

    await side_by_side(KEYS, one)


@on_a_learner("20 keys a second", "1,000 keys of one address")
async def rotating_keys(assault: Assault) -> None:
    """A new worker for every lease."""

    async def one(_: int) -> None:
        await over_and_over(assault, lambda _: take_leases(assault, assault.key(), 1), 2.0, 100)

    await side_by_side(10, one)


@on_a_learner("100 a second", "8 keys of one address")
@admitting(8)
async def nonsense_submissions(assault: Assault, mux: Mux) -> None:
    """Groups under leases that do not exist, or that we have, with nonsense in them."""
    lease = await ask_lease(assault, mux)
    for number in range(1_000):
        which = lease.lease if lease and number % 2 else secrets.token_bytes(16)
        await tried(assault, mux.request, SUBMISSIONS_PROTOCOL, spoiled(mux.key, which, 20_000))
        assault.spent.count("submitted")
        await trio.sleep(0.08)
        if mux.over.is_set():
            return


@on_a_learner("a megabyte each, unfinished", "384 streams of 24 keys")
@admitting(24)
async def half_submissions(assault: Assault, mux: Mux) -> None:
    """As many submissions as are taken at a time, whose last bytes never come."""
    for _ in range(16):
        stream = await mux.open(SUBMISSIONS_PROTOCOL, (1_000_000).to_bytes(4, "big"))
        with trio.move_on_after(1.0):
            await stream.send(bytes(999_000))
        await trio.sleep(1.0)
    await mux.over.wait()


@on_a_learner("40 a second", "4 keys of one address")
async def uninvited_reports(assault: Assault) -> None:
    """Ask for what a coordinator alone may know."""
    ask = codec.encode(WantReport(type="want_report"))

    async def use(mux: Mux) -> None:
        while not mux.over.is_set():
            answer = await mux.request(REPORTS_PROTOCOL, ask)
            assault.spent.count("told" if answer else "not told")
            await trio.sleep(0.1)

    try:
        with suppress(*FAILURES):
            await connected(assault, 4, use)
    finally:
        assault.claim("reports told to strangers", assault.spent.counts.get("told", 0), 0)
