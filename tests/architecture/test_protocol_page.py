"""`swarm/PROTOCOL.md` says the same numbers and names as the code."""

import re
from pathlib import Path

from swarm.errors import Reject
from swarm.leases.intake import BLOCK_PART, RELAYED_PART
from swarm.leases.known_workers import CREDIT_LASTS_S, LONG_SHARE, LOST_SHARE, WAITS_S
from swarm.leases.lease_table import LeaseRules
from swarm.limits.quotas import RATES
from swarm.peers.reputation import LITTLE, MUCH
from swarm.transport import base
from swarm.transport.libp2p import frames, relay, yamux
from swarm.weights import chunk_server, manifest
from swarm.wire import codec, messages

PAGE = (Path(__file__).parents[2] / "swarm" / "PROTOCOL.md").read_text()
IN_TABLE = re.compile(r"^\| `([A-Z_]+_MAX)`[^|]*\| (\d+) \|$", re.MULTILINE)
IN_TEXT = re.compile(r"`([A-Z_]+_MAX)` = (\d+)")


def limits(module: object) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.endswith("_MAX") and isinstance(value, int)
    }


def said() -> list[tuple[str, int]]:
    return [(name, int(value)) for name, value in IN_TABLE.findall(PAGE) + IN_TEXT.findall(PAGE)]


def test_limits_are_those_of_the_code() -> None:
    code = limits(base) | limits(codec) | limits(messages)
    code |= limits(frames) | limits(yamux)
    code |= limits(relay) | limits(manifest)
    code |= limits(chunk_server)
    assert {name: code[name] for name, _ in said()} == dict(said())
    assert all(code[name] == value for name, value in said())


def test_every_limit_of_messages_floods_and_circuits_is_on_the_page() -> None:
    code = limits(messages) | limits(frames)
    code |= {n: v for n, v in limits(relay).items() if n.startswith(("RES", "CIRCUIT"))}
    buffers_only = {"OUTBOX_BYTES_MAX", "RECORD_PLAIN_BYTES_MAX"}  # of one connection, no rate
    assert {name for name, _ in said()} >= set(code) - buffers_only


def test_every_limit_of_weights_is_on_the_page() -> None:
    assert {name for name, _ in said()} >= set(limits(manifest))


def test_what_workers_on_trial_may_hold_is_that_of_the_code() -> None:
    text = " ".join(PAGE.split("## Leases")[1].split("## Submissions")[0].split())
    rules = LeaseRules()
    for words in (
        f"{rules.trial_share:g} of them (at least {rules.trial_groups_min} groups)",
        f"in leases of {rules.first_life_s:g} s",
        f"one public block hold at most {BLOCK_PART:g}, and all relayed ones {RELAYED_PART:g}",
        f"asks every {WAITS_S:g} s",
    ):
        assert words in text
    assert (LONG_SHARE, LOST_SHARE, CREDIT_LASTS_S) == (0.5, 0.75, 4 * 3600.0)  # in words there


def test_times_and_sizes_of_streams_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split("## Streams")[1].split("## Hello")[0].split())
    for words in (
        f"nothing has come for {yamux.PING_TIMEOUT_S:.0f} s",
        f"one ping in {yamux.PING_INTERVAL_S:.0f} s",
        f"takes no byte for {yamux.WRITE_STALL_MAX_S:.0f} s",
        f"data under {frames.FRAME_BYTES_SMALL} bytes",
    ):
        assert words in text


def test_protocol_ids_and_domains_are_on_the_page() -> None:
    headings = [line for line in PAGE.splitlines() if line.startswith("## ")]
    for protocol in (
        messages.HELLO_PROTOCOL,
        messages.ADVERTS_PROTOCOL,
        messages.ROLLOUTS_PROTOCOL,
        messages.HOLDERS_PROTOCOL,
        messages.adverts_topic("<run id>"),
        messages.weights_topic("<run id>"),
        messages.HEADS_PROTOCOL,
        messages.MANIFEST_PROTOCOL,
    ):
        assert any(f"`{protocol}`" in heading for heading in headings)
    for domain in (
        messages.GROUP_DOMAIN,
        messages.ADVERT_DOMAIN,
        messages.HELLO_DOMAIN,
        messages.HEAD_DOMAIN,
    ):
        assert domain.endswith(b"\0")
        assert f"`{domain[:-1].decode()}` and a zero byte" in PAGE
    for domain in (manifest.MANIFEST_DOMAIN, manifest.STATE_DOMAIN):
        assert domain.endswith(b"\0")
        assert f"`{domain[:-1].decode()}`, a zero byte" in " ".join(PAGE.split())


def test_types_of_tensors_are_those_of_the_code() -> None:
    listed = PAGE.split("holds positions in this list, from 0:")[1].split(", spelt")[0]
    assert tuple(re.findall(r"`([A-Z0-9a-z_]+)`", listed)) == manifest.DTYPES


def test_weights_of_offences_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| ([0-9.]+) \| (yes|no)", PAGE, re.MULTILINE)
    code = {str(r): (MUCH.get(r, LITTLE.get(r, 0.0)), r in MUCH) for r in Reject}
    assert {name: (float(weight), only == "yes") for name, weight, only in rows} == code
    assert len(rows) == len(code)


def test_quotas_are_those_of_the_code() -> None:
    table = PAGE.split("**Quotas.**")[1].split("Asking in vain")[0]
    rows = re.findall(r"^\|.*\| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    assert sorted((float(a), float(b)) for a, b in rows) == sorted(
        (rate.per_s, rate.burst) for rate in RATES.values()
    )
