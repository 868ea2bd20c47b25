"""Where a broker is, as people type it."""

from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.telemetry.broker_address import Broker


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mqtt://localhost", ("localhost", 1883, False, None)),
        ("mqtt://10.0.0.1:99/", ("10.0.0.1", 99, False, None)),
        ("mqtts://me@broker.example", ("broker.example", 8883, True, "me")),
        ("mqtt://" + "a." * 126, ("a." * 126, 1883, False, None)),
        ("mqtts://[2001:db8::1]:8884", ("2001:db8::1", 8884, True, None)),
    ],
)
def test_a_broker_is_read(text: str, expected: tuple[str, int, bool, str | None]) -> None:
    broker = Broker.parse(text)
    assert (broker.host, broker.port, broker.tls, broker.user) == expected
    assert Broker.parse(str(broker)).port == broker.port


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "http://localhost", "mqtt://", "mqtt://a b", "mqtt://h:99999", "mqtt://h:x",
     "mqtt://h/path", "mqtt://h\n", "mqtt://me:secret@h", "mqtt://@h",
     "mqtt://me:a/secret@h", "mqtt://me:a@secret@h", "me:secret@h", "://me:secret/@@h:x",
     "mqtt://a..b", "mqtt://.b", "mqtt://" + "a" * 64, "mqtt://" + "a." * 127],
)  # fmt: skip
def test_what_is_no_broker_is_refused_and_no_password_is_shown(text: str) -> None:
    with pytest.raises(ConfigError) as info:
        Broker.parse(text)
    assert "secret" not in str(info.value)
    assert "mqtts://" in str(info.value)


def test_a_password_needs_a_user_and_is_not_shown() -> None:
    broker = Broker.parse("mqtts://me@host", password="hush")
    assert broker.password == "hush"
    assert "hush" not in f"{broker!r} {broker}"
    with pytest.raises(ConfigError, match="user"):
        Broker.parse("mqtts://host", password="hush")


def test_certificates_need_tls_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match="no such file"):
        Broker.parse("mqtts://host", ca_file=file)
    file.touch()
    assert Broker.parse("mqtts://host", ca_file=file).ca_file == file
    with pytest.raises(ConfigError, match="mqtts"):
        Broker.parse("mqtt://host", ca_file=file)
