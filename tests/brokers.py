"""Debian's mosquitto as tests use it: on loopback, with TLS and users if need be, killed and
started again at will."""

import ipaddress
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PATHS = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/sbin"
USER, PASSWORD = "swarm", "correct horse"
STARTS_S = 15.0


def mosquitto() -> str | None:
    return shutil.which("mosquitto", path=PATHS)


def no_mosquitto() -> str | None:
    """Why tests with the marker `broker` cannot run here, if so."""
    return None if mosquitto() else "mosquitto is not installed: apt-get install mosquitto"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Mosquitto:
    """One broker on one port; what it had retained is gone when it is killed."""

    directory: Path
    port: int
    lines: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it listens."""
        config = self.directory / "mosquitto.conf"
        config.write_text("\n".join(("persistence false", *self.lines)) + "\n")
        binary = mosquitto()
        assert binary is not None
        with (self.directory / "mosquitto.log").open("ab") as log:
            self.process = subprocess.Popen([binary, "-c", str(config)], stdout=log, stderr=log)
        trio.run(self._listens)

    async def _listens(self) -> None:
        assert self.process is not None
        with trio.fail_after(STARTS_S):
            while self.process.poll() is None:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", self.port)
                except OSError:
                    await trio.sleep(0.02)
                else:
                    await stream.aclose()
                    return
        raise AssertionError((self.directory / "mosquitto.log").read_text())

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def open_mosquitto(
    directory: Path, *, tls: bool = False, users: bool = False
) -> Iterator[Mosquitto]:
    """A broker that listens, until the block ends. With `tls` the certificates are in `ca.pem`."""
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"listener {port} 127.0.0.1", f"allow_anonymous {'false' if users else 'true'}"]
    if tls:
        make_certificates(directory)
        lines += [f"certfile {directory}/server.pem", f"keyfile {directory}/server.key"]
    if users:
        password_file = directory / "passwords"
        subprocess.run(
            ["mosquitto_passwd", "-b", "-c", str(password_file), USER, PASSWORD],
            check=True,
            capture_output=True,
        )
        lines += [f"password_file {password_file}"]
    if subprocess.run(["id", "-u"], capture_output=True, check=True).stdout.strip() == b"0":
        lines += ["user root"]  # else it gives its rights up, and cannot read the test's files
    broker = Mosquitto(directory, port, tuple(lines))
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def make_certificates(directory: Path) -> None:
    """`ca.pem`, and with it `server.pem` and `server.key` for 127.0.0.1."""
    now = datetime.now(UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(subject: str, public: ec.EllipticCurvePublicKey, *, is_ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                critical=False,
            )
        )
        made = builder.sign(ca_key, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM)

    (directory / "ca.pem").write_bytes(certificate("test CA", ca_key.public_key(), is_ca=True))
    (directory / "server.pem").write_bytes(
        certificate("test broker", key.public_key(), is_ca=False)
    )
    (directory / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
