"""What free keys can do to a learner: take its leases, and deliver nothing, or nonsense."""

import secrets
from contextlib import suppress

import trio
from siege_wire import FAILURES, Mux

from siege_attacks import Assault, attack, over_and_over, side_by_side, tried
from swarm.errors import RemoteProtocolError
from swarm.identity import Identity
from swarm.wire import codec
from swarm.wire.messages import (
    GROUP_DOMAIN,
    LEASE_REPLY_BYTES_MAX,
    LEASES_PROTOCOL,
    REPORTS_PROTOCOL,
    SUBMISSIONS_PROTOCOL,
    LeaseReply,
    Signed,
    Submission,
    WantLease,
)
from swarm.wire.steering import WantReport

KEYS = 30
PACE_S = 45.0  # in which it shows whether a learner is held up


async def ask_lease(assault: Assault, mux: Mux) -> LeaseReply | None:
    """Ask for a lease as a worker would that has the newest version."""
    version = int(assault.extra.get("version", 1))
    wanted = codec.encode(WantLease(type="want_lease", run_id=assault.run_id, version=version))
    answer = await mux.request(LEASES_PROTOCOL, wanted)
    if answer is None:
        return None
    with suppress(RemoteProtocolError):
        lease = codec.decode(answer, LeaseReply, LEASE_REPLY_BYTES_MAX)
        assault.extra["version"] = lease.learner_version
        return lease
    return None


async def take_leases(assault: Assault, key: Identity, most: int) -> None:
    """Under one key, until cut off or so many asked for."""
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


@attack(
    "leases", "40 requests a second", "30 keys of one address", target="learner", seconds_min=PACE_S
)
async def keys_that_never_deliver(assault: Assault) -> None:
    """Thirty workers that take what they get and do nothing."""

    async def one(_: int) -> None:
        key = assault.key()
        await over_and_over(assault, lambda _: take_leases(assault, key, 10_000), 1.0)

    await side_by_side(KEYS, one)


@attack(
    "leases", "20 keys a second", "1,000 keys of one address", target="learner", seconds_min=PACE_S
)
async def rotating_keys(assault: Assault) -> None:
    """A new worker for every lease."""

    async def one(_: int) -> None:
        await over_and_over(assault, lambda _: take_leases(assault, assault.key(), 1), 2.0, 100)

    await side_by_side(10, one)


@attack("leases", "100 a second", "8 keys of one address", target="learner", seconds_min=PACE_S)
async def nonsense_submissions(assault: Assault) -> None:
    """Groups under leases that do not exist, or that we have, with nonsense in them."""

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            key = assault.key()
            async with assault.admitted(0, key) as mux:
                lease = await ask_lease(assault, mux)
                for number in range(1_000):
                    which = lease.lease if lease and number % 2 else secrets.token_bytes(16)
                    await tried(assault, mux.request, SUBMISSIONS_PROTOCOL, spoiled(key, which))
                    assault.spent.count("submitted")
                    await trio.sleep(0.08)
                    if mux.over.is_set():
                        return

        await over_and_over(assault, once, 1.0)

    await side_by_side(8, one)


def spoiled(key: Identity, lease: bytes) -> bytes:
    """A submission whose signature holds, and nothing else does."""
    payload = secrets.token_bytes(20_000)
    record = codec.encode(
        Signed(payload=payload, signer=key.peer_id, signature=key.sign(GROUP_DOMAIN, payload))
    )
    return codec.encode(Submission(type="submission", lease=lease, record=record))


@attack(
    "leases",
    "a megabyte each, unfinished",
    "384 streams of 24 keys",
    target="learner",
    seconds_min=PACE_S,
)
async def half_submissions(assault: Assault) -> None:
    """As many submissions as are taken at a time, whose last bytes never come."""

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                for _number in range(16):
                    stream = await mux.open(SUBMISSIONS_PROTOCOL, (1_000_000).to_bytes(4, "big"))
                    with trio.move_on_after(1.0):
                        await stream.send(bytes(999_000))
                    await trio.sleep(1.0)
                await mux.over.wait()

        await over_and_over(assault, once, 1.0)

    await side_by_side(24, one)


@attack("leases", "40 a second", "4 keys of one address", target="learner", seconds_min=PACE_S)
async def uninvited_reports(assault: Assault) -> None:
    """Ask for what a coordinator alone may know."""
    ask = codec.encode(WantReport(type="want_report"))

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                while not mux.over.is_set():
                    answer = await mux.request(REPORTS_PROTOCOL, ask)
                    assault.spent.count("told" if answer else "not told")
                    await trio.sleep(0.1)

        await over_and_over(assault, once, 1.0)

    with suppress(*FAILURES):
        await side_by_side(4, one)
    assault.claim("reports told to strangers", assault.spent.counts.get("told", 0), 0)
