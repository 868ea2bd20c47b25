"""What a program outside of ours does with the alarms that a node publishes."""

from swarm.identity import PeerId
from swarm.telemetry.reports import REPORT_BYTES_MAX, AlarmsReport, _open


def decode_alarms(payload: bytes, peer: PeerId) -> AlarmsReport:
    """Alarms that came under the name of `peer`."""
    return _open(payload, peer, AlarmsReport, REPORT_BYTES_MAX)
