"""A node's telemetry: reports, alarms as notes, and what goes to a broker."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from node.config import NodeConfig, load_config
from node.observe.alarms import (
    DISK_FREE_BYTES_MIN,
    HISTORY_S,
    MEMORY_BYTES_MIN,
    ROUNDS_KEPT,
    identity_of,
)
from node.observe.node_reports import Extras, MachineResources, Reporter, Traffic
from node.observe.telemetry import (
    ALARM_NOTE,
    ALARMS_AGAIN_S,
    BROKER_NOTE,
    FIRST_TRIES,
    Sources,
    Telemetry,
    broker_of,
    machine_of,
)
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.mqtt import PUBLISH_QUEUE_MAX, MqttPublisher, publisher_of
from swarm.telemetry.reports import (
    Alarm,
    AlarmReport,
    Topic,
    decode_report,
    decode_status,
)
from swarm.transport.base import TransportCounters
from tests.alarms_reader import decode_alarms
from tests.support import run
from tests.unit.monitor_records import snapshot

NODE = Identity(b"n" * 32)
RUN = "test-run"
INTERVAL_S = 2.0


class Rig:
    """Telemetry of a node whose machine and notes a test sets."""

    def __init__(self, publisher: MqttPublisher | None = None) -> None:
        self.machine = MachineResources(MEMORY_BYTES_MIN, DISK_FREE_BYTES_MIN)
        self.notes = {"work": "no work"}
        self.round = 1
        self.telemetry = Telemetry(
            Reporter(NODE.peer_id, RUN, "node", "test", instance="i", interval_s=INTERVAL_S),
            NODE,
            RUN,
            Sources(
                lambda: snapshot(notes=tuple(self.notes.values()), round=self.round),
                lambda: Traffic(TransportCounters(), ()),
                Extras,
                lambda: self.machine,
            ),
            self.notes,
            interval_s=INTERVAL_S,
            publisher=publisher,
            now_s=lambda: 1_000.0 + trio.current_time(),
            run_sync=self.run_sync,
        )

    async def run_sync(self, function: Any, *args: Any) -> Any:
        return function(*args)


def published(publisher: MqttPublisher) -> list[Topic]:
    topics = []
    while (message := publisher._queue.take()) is not None:
        topics.append(Topic.parse(message.topic))
        decode = {"report": decode_report, "alarms": decode_alarms}[topics[-1].kind]
        decode(message.payload, NODE.peer_id)
        assert message.retain
        assert message.qos == (0 if topics[-1].kind == "report" else 1)
    return topics


def some_publisher() -> MqttPublisher:
    return publisher_of(Broker.parse("mqtt://127.0.0.1:1"), NODE, RUN, "i", Random(1))


def test_an_alarm_is_a_note_as_long_as_it_stands() -> None:
    async def body() -> None:
        rig = Rig()
        assert (await rig.telemetry.report()).alarms == ()
        rig.machine = MachineResources(MEMORY_BYTES_MIN, 0)
        first, second = await rig.telemetry.report(), await rig.telemetry.report()
        assert [each.kind for each in second.alarms] == [Alarm.DISK_LOW]
        assert "pool_bytes_max" in rig.notes[ALARM_NOTE + Alarm.DISK_LOW]
        assert first.notes == second.notes == ("no work",)  # the alarm is told of once
        rig.machine = MachineResources(MEMORY_BYTES_MIN, DISK_FREE_BYTES_MIN)
        assert (await rig.telemetry.report()).alarms == ()
        assert rig.notes == {"work": "no work"}

    run(body, virtual=True)


def test_reports_come_each_interval_and_the_history_goes_back_far_enough() -> None:
    async def body() -> None:
        rig = Rig()
        with trio.move_on_after(3 * HISTORY_S):
            await rig.telemetry.run()
        assert rig.telemetry.latest is not None
        assert rig.telemetry.latest.sequence == pytest.approx(3 * HISTORY_S / INTERVAL_S, abs=1)
        kept = rig.telemetry._history
        span_s = kept[-1].sent_at_s - kept[0].sent_at_s
        assert HISTORY_S * 0.9 <= span_s <= HISTORY_S * 1.1

    run(body, virtual=True, timeout_s=10 * HISTORY_S)


def test_a_report_of_each_of_the_last_rounds_is_kept_however_long_they_take() -> None:
    async def body() -> None:
        rig = Rig()
        for _ in range(ROUNDS_KEPT + 3):
            rig.round += 1
            for _ in range(5):
                await rig.telemetry.report()
                await trio.sleep(HISTORY_S)
        kept = [each.metrics["round"] for each in rig.telemetry._rounds]
        assert kept == [float(n) for n in range(5, ROUNDS_KEPT + 5)]

    run(body, virtual=True, timeout_s=100 * HISTORY_S)


def test_alarms_are_published_when_they_change() -> None:
    async def body() -> None:
        publisher = some_publisher()
        rig = Rig(publisher)
        for machine in (
            rig.machine,
            rig.machine,
            MachineResources(0, 0),
            MachineResources(0, 0),
            rig.machine,
        ):
            rig.machine = machine
            await rig.telemetry.report()
        kinds = [each.kind for each in published(publisher)]
        assert kinds == [
            "alarms", "report", "report", "alarms", "report", "report", "alarms", "report"
        ]  # fmt: skip

    run(body, virtual=True)


def test_alarms_that_say_something_else_are_published() -> None:
    """Its level, as long as it stands: a warning becomes critical."""

    async def body() -> None:
        publisher = some_publisher()
        rig = Rig(publisher)
        for left_bytes in (DISK_FREE_BYTES_MIN - 1, 0, 0):
            rig.machine = MachineResources(MEMORY_BYTES_MIN, left_bytes)
            await rig.telemetry.report()
        kinds = [each.kind for each in published(publisher)]
        assert kinds == ["alarms", "report", "alarms", "report", "report"]

    run(body, virtual=True)


def test_a_standing_alarm_whose_figure_changes_is_told_again_rarely() -> None:
    """Less of the disk is left at each report, and the alarm says how much."""

    async def body() -> None:
        publisher = some_publisher()
        rig = Rig(publisher)
        texts, told, counted = set(), 0, int(2.5 * ALARMS_AGAIN_S / INTERVAL_S)
        for number in range(counted):
            left_bytes = DISK_FREE_BYTES_MIN - ((number + 1) << 20)
            rig.machine = MachineResources(MEMORY_BYTES_MIN, left_bytes)
            report = await rig.telemetry.report()
            texts |= {each.text for each in report.alarms}
            told += sum(each.kind == "alarms" for each in published(publisher))
            await trio.sleep(INTERVAL_S)
        assert len(texts) == counted
        assert told == 3  # as it began, and at two refreshes
        rig.machine = MachineResources(MEMORY_BYTES_MIN, DISK_FREE_BYTES_MIN)
        for expected in (1, 0):  # that it ended; nothing is told again of what does not stand
            await rig.telemetry.report()
            assert sum(each.kind == "alarms" for each in published(publisher)) == expected
            await trio.sleep(2 * ALARMS_AGAIN_S)

    run(body, virtual=True, timeout_s=20 * ALARMS_AGAIN_S)


def test_an_alarm_of_another_peer_is_another_alarm() -> None:
    one, other = (
        AlarmReport(kind=Alarm.ONE_PRODUCER, level="warning", text="t", advice="a", subject=peer)
        for peer in ("p", "q")
    )
    later = one.model_copy(update={"text": "t of later"})
    assert identity_of([one]) == identity_of([later]) != identity_of([other])
    worse = one.model_copy(update={"level": "critical"})
    assert identity_of([worse]) != identity_of([one])
    assert identity_of([one, other]) == identity_of([other, one])


def test_a_broker_that_comes_back_gets_the_alarms_again() -> None:
    """The message of their change is among those that were dropped while it was away."""

    async def body() -> None:
        publisher = some_publisher()
        rig = Rig(publisher)
        rig.machine = MachineResources(0, 0)
        for _ in range(2 * PUBLISH_QUEUE_MAX):
            await rig.telemetry.report()
        assert {each.kind for each in published(publisher)} == {"report"}
        for established in (1, 1, 2):
            publisher.established = established
            await rig.telemetry.report()
        kinds = [each.kind for each in published(publisher)]
        assert kinds == ["alarms", "report", "report", "alarms", "report"]

    run(body, virtual=True)


def test_a_broker_that_is_away_is_a_note() -> None:
    async def body() -> None:
        publisher = some_publisher()
        rig = Rig(publisher)
        publisher.failure = "no route"
        publisher.connections = FIRST_TRIES  # a machine that starts is busy
        await rig.telemetry.report()
        assert BROKER_NOTE not in rig.notes
        publisher.connections += 1
        await rig.telemetry.report()
        assert "no route" in rig.notes[BROKER_NOTE]
        for _ in range(100):
            await rig.telemetry.report()
        report = rig.telemetry.latest
        assert report is not None
        assert 0 < publisher.dropped - 1 <= report.metrics["telemetry_dropped_total"] + 1
        publisher.connected = True
        await rig.telemetry.report()
        assert BROKER_NOTE not in rig.notes

    run(body, virtual=True)


def test_the_will_is_signed_and_of_its_connection() -> None:
    publisher = some_publisher()
    for number in (1, 2):
        will, online = (publisher._status(number, up) for up in (False, True))
        assert (will.topic, will.qos, will.retain) == (online.topic, 1, True)
        gone, there = (decode_status(each.payload, NODE.peer_id) for each in (will, online))
        assert (gone.online, there.online) == (False, True)
        assert gone.connection == there.connection == number


def test_what_is_left_of_the_machine(tmp_path: Path) -> None:
    here = machine_of(tmp_path)
    assert here.memory_available_bytes > 0
    assert here.disk_free_bytes is not None
    assert machine_of(tmp_path / "none").disk_free_bytes is None


def config(**flags: Any) -> NodeConfig:
    return load_config(flags, {"SWARM_NODE_TELEMETRY_PASSWORD": "hush"})


def test_settings_say_where_reports_go(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    made = config(telemetry="mqtts://me@host", telemetry_ca=str(ca), telemetry_interval_s="5")
    assert broker_of(made, "hush") == Broker("host", 8883, True, "me", "hush", ca)
    assert made.telemetry_interval_s == 5.0
    assert "hush" not in repr(made)
    assert broker_of(config(), "hush") is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"telemetry": "host:1883"}, "--telemetry"),
        ({"telemetry": "mqtt://me:word@host"}, "--telemetry"),
        ({"telemetry_interval_s": "0"}, "--telemetry-interval"),
        ({"metrics_listen": "9464"}, "--metrics-listen"),
        ({"metrics_listen": "host:99999"}, "--metrics-listen"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(flags: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as info:
        config(**flags)
    assert named in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("value", ["mqtt://me:secret@h", "mqtt://me:a/secret@h", "me:a@secret@h:1"])
def test_a_password_in_the_address_is_not_printed(value: str) -> None:
    for flags, environ in (({"telemetry": value}, {}), ({}, {"SWARM_NODE_TELEMETRY": value})):
        with pytest.raises(ConfigError) as info:
            load_config(flags, environ)
        assert "secret" not in str(info.value)
        assert "a password comes from the environment" in str(info.value)


def test_settings_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--telemetry"):
        broker_of(config(telemetry="mqtt://host"), "hush")  # no user for the password
    with pytest.raises(ConfigError, match="--telemetry-ca"):
        broker_of(config(telemetry_ca=str(tmp_path)), None)
    with pytest.raises(ConfigError, match="no such file"):
        broker_of(config(telemetry="mqtts://host", telemetry_ca=str(tmp_path / "x")), None)
