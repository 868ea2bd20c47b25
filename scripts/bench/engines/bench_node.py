"""How quickly a node answers its peers while it trains, and how much it can judge in a second.

    python bench_node.py [--model DIRECTORY] [--seconds S] [--repeats N] [--json]

A real node (`swarm-node join`, its trainer with the default number of threads) trains without
pause. This process is a bare libp2p peer of its: every 20 ms it asks in turn with a signed hello
and with a want for one of the node's groups, and it shares groups of its own, on which the node
trains as well. In between the trainer is stopped for a while (SIGSTOP): those are the idle node's
answers. A third process that only echoes over the same transport, asked half as often, shows how
much of an answer's time is the machine's and the transport's. A request that is refused or fails
counts as slower than any answer. The rest of the table is `node_throughput.py`'s.
"""

import argparse
import gc
import json
import math
import os
import secrets
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import node_throughput as throughput
import psutil
import trio
from node_children import (
    ECHO_BYTES_MAX,
    ECHO_PROTOCOL,
    LOOPBACK,
    echo_process,
    status,
    training_node,
)

from node.config import NodeConfig, load_config
from node.hosting.models import resolve_model
from node.verification.verifier import InlineVerifier
from swarm.errors import RemoteProtocolError, TransportError
from swarm.exchange.pool import Pool, PoolLimits
from swarm.exchange.service import Exchange, ExchangeRules
from swarm.identity import Identity, PeerId
from swarm.rollouts import RolloutGroup
from swarm.storage.files import Runtime
from swarm.transport.base import Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    ADVERTS_REPLY_BYTES_MAX,
    GROUPS_REPLY_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    AdvertsReply,
    Hello,
    RecentAdverts,
    Want,
)

BULK_BYTES, BULK_REQUESTS = 2**20, 8
TICK_S = 0.02
ANSWER_TIMEOUT_S = 5.0
TRAINING_S, IDLE_S = 5.0, 2.5  # of one turn
REST_S = 0.3  # after the trainer was stopped, before an idle turn
SHARE_EVERY_S, SHARE_GROUPS, SHARES_MAX = 1.0, 4, 60
KINDS = ("hello", "want", "echo")


def main() -> None:
    arguments = _arguments()
    results = trio.run(_bench, arguments)
    if arguments.json:
        json.dump(results, sys.stdout)
    else:
        _print(results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How quickly a node answers and judges.")
    parser.add_argument("--model", default="tiny", help="a model directory (default: tiny)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, s (up to 60)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


async def _bench(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(
        {"model": arguments.model, "group_size": throughput.GROUP_SIZE}, os.environ
    )
    model = resolve_model(config, partial(print, file=sys.stderr))
    load = os.getloadavg()[0]
    identity = Identity.generate()
    count = max(arguments.repeats * throughput.GROUPS_PER_REPEAT, SHARES_MAX * SHARE_GROUPS)
    groups, prompts = await throughput.sample(config, model, identity, count)
    gc.collect()
    gc.freeze()  # no pauses of ours for what torch left in memory
    with tempfile.TemporaryDirectory() as scratch:
        shares = _Shares(groups, prompts)
        answers = await _answers(config, model, identity, shares, arguments, Path(scratch))
        rows = await throughput.measure(config, identity, groups, arguments.repeats, Path(scratch))
    return {
        "run": config.run.run_id,
        "model": model if arguments.model != "tiny" else "tiny",
        "load_before": load,
        "tokens_per_completion": sum(len(c.token_ids) for g in groups for c in g.completions)
        / (len(groups) * throughput.GROUP_SIZE),
        **answers,
        "throughput": [asdict(row) for row in rows],
    }


# --- answers while training ---------------------------------------------------------------------


@dataclass(slots=True)
class _Shares:
    """Groups that are handed to the node bit by bit."""

    groups: Sequence[RolloutGroup]
    prompts: Sequence[str]
    rounds: int = 0

    async def share_forever(self, exchange: Exchange) -> None:
        while (self.rounds + 1) * SHARE_GROUPS <= len(self.groups):
            part = slice(self.rounds * SHARE_GROUPS, (self.rounds + 1) * SHARE_GROUPS)
            self.rounds += 1
            groups = [replace(group, round=self.rounds) for group in self.groups[part]]
            unknown = [(0.0,) * throughput.GROUP_SIZE] * SHARE_GROUPS  # stays in our own pool
            await exchange.share(groups, self.prompts[part], unknown)
            await trio.sleep(SHARE_EVERY_S)


@dataclass(slots=True)
class _Probe:
    """This process as a peer, and the times of its answers by kind and phase, ms."""

    run_id: str
    identity: Identity
    transport: Transport
    node: PeerId
    echo: PeerId
    wanted: bytes = b""  # id of one of the node's groups
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    times_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def find_group(self) -> None:
        ask = codec.encode(RecentAdverts(type="recent_adverts", run_id=self.run_id))
        answer = await self.transport.request(
            self.node,
            ADVERTS_PROTOCOL,
            ask,
            timeout_s=ANSWER_TIMEOUT_S,
            response_bytes_max=ADVERTS_REPLY_BYTES_MAX,
        )
        reply = codec.decode(answer, AdvertsReply, ADVERTS_REPLY_BYTES_MAX)
        adverts = [codec.decode_advert(record)[1] for record in reply.records]
        own = next(advert for advert in adverts if advert.producer == self.node)
        self.wanted = own.groups[0].group_id

    async def ask_for(self, seconds: float, phase: str) -> None:
        """One request to the node each tick, half as many to the echo."""
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for tick in range(round(seconds / TICK_S)):
                await trio.sleep_until(started + tick * TICK_S)
                nursery.start_soon(self._ask, ("hello", "want")[tick % 2], phase)
                if tick % 2:
                    await trio.sleep_until(started + (tick + 0.5) * TICK_S)
                    nursery.start_soon(self._ask, "echo", phase)

    async def _ask(self, kind: str, phase: str) -> None:
        peer, protocol, payload, answer_max = self._request(kind)
        began = trio.current_time()
        try:
            await self.transport.request(
                peer, protocol, payload, timeout_s=ANSWER_TIMEOUT_S, response_bytes_max=answer_max
            )
            took_s = trio.current_time() - began
        except (TransportError, RemoteProtocolError):
            took_s = math.inf
        self.times_ms[f"{kind}, {phase}"].append(1e3 * took_s)

    def _request(self, kind: str) -> tuple[PeerId, str, bytes, int]:
        if kind == "echo":
            return self.echo, ECHO_PROTOCOL, self.wanted, ECHO_BYTES_MAX
        if kind == "want":
            want = Want(type="want", run_id=self.run_id, group_ids=(self.wanted,))
            return self.node, ROLLOUTS_PROTOCOL, codec.encode(want), GROUPS_REPLY_BYTES_MAX
        now_s = int(time.time())
        hello = Hello(
            type="hello",
            run_id=self.run_id,
            instance=self.instance,
            started_at_s=now_s,
            sent_at_s=now_s,
            agent="bench",
            addresses=self.transport.addresses(),
        )
        signed = codec.sign_hello(hello, self.identity)
        return self.node, HELLO_PROTOCOL, signed, HELLO_REPLY_BYTES_MAX

    async def bulk(self, repeats: int) -> list[float]:
        """Megabytes per second that come back while as many go out, for each repeat."""
        payload, rates = secrets.token_bytes(BULK_BYTES), []
        for _ in range(repeats):
            began = trio.current_time()
            for _ in range(BULK_REQUESTS):
                await self.transport.request(
                    self.echo,
                    ECHO_PROTOCOL,
                    payload,
                    timeout_s=60,
                    response_bytes_max=ECHO_BYTES_MAX,
                )
            rates.append(BULK_REQUESTS * BULK_BYTES / (trio.current_time() - began) / 1e6)
        return sorted(rates)


async def _answers(
    config: NodeConfig,
    model: str,
    identity: Identity,
    shares: _Shares,
    arguments: argparse.Namespace,
    scratch: Path,
) -> dict[str, Any]:
    data_dir = scratch / "node"
    data_dir.mkdir()
    async with (
        echo_process() as echo,
        training_node(model, data_dir, throughput.GROUP_SIZE) as trainer,
        open_libp2p(identity, [LOOPBACK]) as transport,
    ):
        before = await status(data_dir)
        assert before is not None
        probe = _Probe(
            config.run.run_id,
            identity,
            transport,
            await transport.connect(before.addresses[0]),
            await transport.connect(echo),
        )
        await probe.find_group()
        with Pool(":memory:", PoolLimits()) as pool:
            exchange = _exchange(config, identity, transport, pool)
            await _turns(probe, exchange, shares, trainer, arguments.seconds)
        after = await status(data_dir)
        assert after is not None
        trainer.suspend()
        rates = await probe.bulk(arguments.repeats)
        trainer.resume()
    return {
        "rounds": after.round - before.round,
        "foreign_groups_accepted": after.accepted,
        "answers_ms": {name: _quantiles(times) for name, times in probe.times_ms.items()},
        "bulk_mb_per_s": rates[len(rates) // 2],
    }


def _exchange(config: NodeConfig, identity: Identity, transport: Transport, pool: Pool) -> Exchange:
    limits = config.run.limits
    return Exchange(
        ExchangeRules(
            config.run.run_id, 0, limits.record_life_s, limits.clock_skew_s, limits.group_size_max
        ),
        identity,
        transport,
        pool,
        InlineVerifier(config.run).verify,
        Runtime(time.time, Random(0), trio.to_thread.run_sync),
    )


async def _turns(
    probe: _Probe, exchange: Exchange, shares: _Shares, trainer: psutil.Process, seconds: float
) -> None:
    async with trio.open_nursery() as services:
        await services.start(exchange.run)
        for _ in range(math.ceil(seconds / TRAINING_S)):
            async with trio.open_nursery() as turn:
                turn.start_soon(shares.share_forever, exchange)
                await trio.sleep(REST_S)
                await probe.ask_for(TRAINING_S, "training")
                turn.cancel_scope.cancel()
            trainer.suspend()
            await trio.sleep(REST_S)
            await probe.ask_for(IDLE_S, "idle")
            trainer.resume()
        services.cancel_scope.cancel()


def _quantiles(times_ms: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times_ms)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    failed = sum(map(math.isinf, ordered))
    return {
        "p50": at(0.5),
        "p95": at(0.95),
        "p99": at(0.99),
        "max": ordered[-1],
        "requests": len(ordered),
        "failed": failed,
    }


# --- the table ----------------------------------------------------------------------------------


def _print(results: dict[str, Any]) -> None:
    print(
        f"run {results['run']}, policy {results['model']}, groups of {throughput.GROUP_SIZE} "
        f"sampled from it, {results['tokens_per_completion']:.1f} tokens a completion; "
        f"{results['rounds']} rounds and {results['foreign_groups_accepted']} foreign groups "
        f"while asked; load before {results['load_before']:.1f}"
    )
    print(
        f"{'answers, ms':26} {'p50':>8} {'p95':>8} {'p99':>8} {'max':>8} {'requests':>9} "
        f"{'failed':>7} {'p99 / idle':>11}"
    )
    for kind in KINDS:
        idle = results["answers_ms"][f"{kind}, idle"]["p99"]
        for phase in ("training", "idle"):
            row = results["answers_ms"][f"{kind}, {phase}"]
            times = " ".join(f"{row[name]:8.1f}" for name in ("p50", "p95", "p99", "max"))
            print(
                f"{kind + ', ' + phase:26} {times} {row['requests']:9} {row['failed']:7} "
                f"{row['p99'] / idle:11.2f}"
            )
    print(f"\n{'throughput, medians':46} {'value':>10} {'unit':5} {'ratio':>7}  to")
    print(f"{'libp2p, 1 MiB echoed, each way':46} {results['bulk_mb_per_s']:10.1f} MB/s")
    for row in results["throughput"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        line = f"{row['what']:46} {row['value']:10,.2f} {row['unit']:5} {ratio:>7}"
        print(f"{line}  {row['baseline']}".rstrip())


if __name__ == "__main__":
    main()
