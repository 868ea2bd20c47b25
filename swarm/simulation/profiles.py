"""Named links: Mbit/s up / down, latency one way between two such hosts.

Published round trips are from a home to a server near its provider. Between two homes one way
crosses both access lines, so it takes about one such round trip. Jitter, and loss without a source,
are assumptions: small for cables, large for radio.

  lan            1000/1000, 0.3 ms: switched Ethernet in one building.
  fibre          300/300, 12 ms: Fios in the FCC's "Measuring Broadband America" of 2016:
                 306/347 measured, round trips 11.5 to 14.7 ms.
  cable          20/200, 28 ms: round trip of "Cable" in WebPageTest's profiles; common rates.
  adsl           1/10, 38 ms: Verizon's DSL in the FCC's report: 11.3 down in the tier 7.1 to 15
                 with 1 up, round trips 37 to 40 ms.
  4g             12/12, 70 ms: "LTE" of WebPageTest's profiles.
  transatlantic  fibre at both ends and 45 ms between New York and London: half the round trip,
                 and all of the loss, of Verizon's service-level agreement (90 ms, 99.5 %).
  volunteer      of each 32 hosts 8 at 1000/1000, 16 at 100/500, 8 at 20/200; latency 12, 28 and
                 28 ms as above, symmetric ones being fibre.
"""

from collections.abc import Mapping

from swarm.errors import ConfigError
from swarm.simulation.links import LinkProfile

_MBIT = 1_000_000 / 8  # bytes per second


def _profile(
    up: float, down: float, latency_ms: float, jitter_ms: float, loss: float = 0.0
) -> LinkProfile:
    return LinkProfile(latency_ms / 1e3, jitter_ms / 1e3, up * _MBIT, down * _MBIT, loss)


_GIGABIT_FIBRE = _profile(1000, 1000, 12, 1, 0.0005)
_FAST_CABLE = _profile(100, 500, 28, 3, 0.001)
_CABLE = _profile(20, 200, 28, 3, 0.001)

# name -> links of hosts 0, 1, 2 ..., repeated
PROFILES: Mapping[str, tuple[LinkProfile, ...]] = {
    "lan": (_profile(1000, 1000, 0.3, 0.05),),
    "fibre": (_profile(300, 300, 12, 1, 0.0005),),
    "cable": (_CABLE,),
    "adsl": (_profile(1, 10, 38, 5, 0.002),),
    "4g": (_profile(12, 12, 70, 20, 0.005),),
    "transatlantic": (_profile(300, 300, 57, 2, 0.005),),
    # mixed, so that smaller swarms get each kind
    "volunteer": (_GIGABIT_FIBRE, _FAST_CABLE, _CABLE, _FAST_CABLE),
}


def links_of(name: str, hosts: int) -> tuple[LinkProfile, ...]:
    """Link of each host by index.

    Raises:
        ConfigError: there is no such profile.
    """
    if name not in PROFILES:
        raise ConfigError(f"profile {name}: no such profile; known: {', '.join(sorted(PROFILES))}")
    mix = PROFILES[name]
    return tuple(mix[host % len(mix)] for host in range(hosts))
