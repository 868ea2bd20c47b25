"""Workers as processes of this machine: started, found again by another coordinator, ended."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import trio

from coordinator.fleet_file import Fleet, Machine
from coordinator.providers import local
from coordinator.providers.base import Condition, ProviderFailed
from coordinator.providers.local import PROCESS_FILE, LocalProvider, worker_environ
from swarm.identity import Identity
from tests.support import environ_of, run

pytestmark = pytest.mark.integration

RUN = """
name = "worked"

[[environments]]
name = "scripted_sum"

[learner]
peer = "{peer}"
"""
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/{peer}"  # no learner listens there: the worker keeps trying
MACHINE = Machine("one", arguments=("--listen", "/ip4/127.0.0.1/tcp/0", "--no-lan"))


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    learner = Identity.generate().peer_id
    run = tmp_path / "run.toml"
    run.write_text(RUN.format(peer=learner))
    return LocalProvider(tmp_path / "workers", fleet_of(run, NOBODY.format(peer=learner)))


def fleet_of(run: Path, *peers: str) -> Fleet:
    return Fleet(run, peers, ())


def again(provider: LocalProvider) -> LocalProvider:
    """What a coordinator that starts anew has."""
    return LocalProvider(provider._directory, fleet_of(provider._run_file, *provider._peers))


def process_of(provider: LocalProvider) -> psutil.Process:
    process = provider._process("one")
    assert process is not None
    return process


def test_a_worker_is_found_again_and_ended_by_who_did_not_start_it(
    provider: LocalProvider,
) -> None:
    async def main() -> None:
        await provider.start(MACHINE)
        process = process_of(provider)
        other = again(provider)
        (instance,) = (await other.look(())).values()
        assert (instance.name, instance.condition) == ("one", Condition.UP)
        assert instance.peer is not None
        assert other.owns(instance.peer)
        await other.start(MACHINE)  # which runs already
        assert process_of(other).pid == process.pid
        await other.release("one")
        assert not await other.look(())
        await provider.look(())
        assert not process.is_running()  # not even as a zombie
        await other.release("one")  # which is not there: no error

    run(main)


def test_a_worker_gets_no_secrets_that_it_does_not_need(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "PAGE_TOKEN", "SWARM_NODE_PASSPHRASE"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("SWARM_NODE_TELEMETRY_PASSWORD", "of the broker")
    monkeypatch.setenv("SWARM_NODE_INVITE", "to elsewhere")
    monkeypatch.setenv("SWARM_NODE_THREADS", "1")

    async def main() -> dict[str, str]:
        await provider.start(MACHINE)
        environ = await environ_of(process_of(provider))
        await provider.release("one")
        return environ

    environ = run(main)
    assert environ["SWARM_NODE_THREADS"] == "1"
    assert environ["PATH"] == os.environ["PATH"]
    assert {"a secret", "of the broker", "to elsewhere"}.isdisjoint(environ.values())


def test_a_worker_gets_the_secrets_that_it_does_need() -> None:
    password = {"SWARM_NODE_TELEMETRY_PASSWORD": "of the broker"}
    for arguments in (("--telemetry", "mqtt://h"), ("--telemetry=mqtt://h",)):
        assert worker_environ(password, arguments, None) == password
    assert worker_environ(password, ("--telemetry-interval", "1"), None) == {}
    assert worker_environ(password, (), "here") == {"SWARM_NODE_INVITE": "here"}
    by_variable = password | {"SWARM_NODE_TELEMETRY": "mqtt://h"}
    assert worker_environ(by_variable, (), None) == by_variable


def test_a_worker_that_died_says_what_it_said_last(provider: LocalProvider) -> None:
    async def main() -> None:
        await provider.start(MACHINE)
        process_of(provider).send_signal(signal.SIGKILL)
        while True:
            (instance,) = (await provider.look(())).values()
            if instance.condition is Condition.FAILED:
                break
            await trio.sleep(0.05)
        assert instance.detail.startswith("it has ended")
        bad = Machine("one", arguments=("--no-such-flag",))
        await provider.start(bad)
        while not (found := (await provider.look(()))["one"].detail).count("no-such-flag"):  # noqa: ASYNC110
            await trio.sleep(0.05)
        assert "there is no --no-such-flag" in found
        await provider.release("one")

    run(main)


def test_another_process_under_the_same_number_is_left_alone(
    provider: LocalProvider, tmp_path: Path
) -> None:
    async def main() -> None:
        await provider.start(MACHINE)
        await provider.release("one")
        record = tmp_path / "workers" / "one" / PROCESS_FILE
        record.write_text(f'{{"pid": {os.getpid()}, "created_s": 1.0}}')
        (instance,) = (await again(provider).look(())).values()
        assert instance.condition is Condition.FAILED
        await again(provider).release("one")  # and this test goes on

    run(main)


def test_a_directory_that_cannot_be_made_is_a_failure_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("a file")
    provider = LocalProvider(tmp_path / "workers", fleet_of(tmp_path / "run.toml"))

    async def main() -> None:
        with pytest.raises(ProviderFailed, match="one: ") as info:
            await provider.start(MACHINE)
        assert "\n" not in str(info.value)

    run(main)


def test_a_worker_that_could_not_be_noted_down_is_ended_at_once(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def fail(path: Path, text: str) -> None:
        made.append(int(text.split('"pid": ')[1].split(",")[0]))
        raise OSError("no space left")

    monkeypatch.setattr(local, "write_whole", fail)

    async def main() -> None:
        with pytest.raises(ProviderFailed, match="no space left"):
            await provider.start(MACHINE)
        assert not psutil.pid_exists(made[0])
        assert not await provider.look(())

    run(main)


def test_a_key_that_others_can_read_stops_one_worker_and_no_coordinator(
    provider: LocalProvider,
) -> None:
    async def main() -> None:
        await provider.start(MACHINE)
        await provider.release("one")
        key = provider._directory / "one" / "identity.pem"
        key.chmod(0o644)
        other = again(provider)
        assert not await other.look(())
        with pytest.raises(ProviderFailed, match="chmod 600"):
            await other.start(MACHINE)

    run(main)
