"""The address of an MQTT broker and its login, parsed from the text that people type."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError

PORT: Final = 1883
TLS_PORT: Final = 8883
PASSWORD_VARIABLE: Final = "SWARM_NODE_TELEMETRY_PASSWORD"
_BROKER = re.compile(
    r"(?P<scheme>mqtts?)://((?P<user>[^@/:\s]{1,128})@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|(?![A-Za-z0-9._-]{254})"
    r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?)(:(?P<port>[0-9]{1,5}))?/?"
)


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker. `ca_file`: whose certificates are believed; None: those of the system."""

    host: str
    port: int
    tls: bool
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"

    @classmethod
    def parse(
        cls, text: str, *, password: str | None = None, ca_file: Path | None = None
    ) -> "Broker":
        """The broker at `mqtt://[user@]host[:port]`, or `mqtts://` for TLS.

        Raises:
            ConfigError: it is not written so, or a password or a file of certificates is of no
                use there.
        """
        match = _BROKER.fullmatch(text)
        port = int(match["port"] or 0) if match else 0
        if match is None or port > 65_535:
            raise ConfigError(
                f"{without_password(text)}: must look like mqtt://host:1883 or "
                "mqtts://user@host:8883; a password comes from the environment"
            )
        tls = match["scheme"] == "mqtts"
        if ca_file is not None and not tls:
            raise ConfigError(f"{text}: certificates are of use with mqtts:// alone")
        if ca_file is not None and not ca_file.is_file():
            raise ConfigError(f"{ca_file}: no such file; name one of CA certificates (PEM)")
        if password is not None and match["user"] is None:
            raise ConfigError(f"{text}: a password needs a user: mqtts://user@host:port")
        return cls(
            match["host"].strip("[]"),
            port or (TLS_PORT if tls else PORT),
            tls,
            match["user"],
            password,
            ca_file,
        )


def without_password(text: str) -> str:
    """A typed broker without its password. Everything before the last `@` is left out, because a
    password may hold any character."""
    scheme, mark, rest = text.rpartition("@")
    if not mark:
        return text
    known = re.match(r"[a-z]{1,8}://", scheme)
    return f"{known[0] if known else ''}…@{rest}"
