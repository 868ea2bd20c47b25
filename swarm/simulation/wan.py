"""Network code of a test in a simulated wide-area network; a fixture of `pytest_plugin`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from swarm.simulation.determinism import deterministic_run
from swarm.simulation.links import LinkProfile
from swarm.simulation.profiles import links_of
from swarm.simulation.world import SimulatedWorld, open_world

T = TypeVar("T")


class Wan:
    """The `wan` fixture: call it with the body of a test."""

    def __call__(
        self,
        main: Callable[[SimulatedWorld], Awaitable[T]],
        *,
        hosts: int = 2,
        profile: str | LinkProfile | Sequence[LinkProfile] = "cable",
        seed: int | str = 0,
        timeout_s: float = 3600.0,
    ) -> T:
        """Run `main` in a new world. `profile`: a name, one link for all hosts, or one per host.
        `timeout_s` is virtual.

        Raises:
            ConfigError: there is no such profile.
            TooSlowError: `main` took longer than `timeout_s`.
        """
        if isinstance(profile, str):
            links: Sequence[LinkProfile] = links_of(profile, hosts)
        elif isinstance(profile, LinkProfile):
            links = [profile] * hosts
        else:
            links = profile

        async def body() -> T:
            failure: Exception | None = None
            async with open_world(seed, hosts, links[0], dict(enumerate(links))) as world:
                try:
                    with trio.fail_after(timeout_s):
                        return await main(world)
                except Exception as error:  # noqa: BLE001 - raised below, out of the world's nursery
                    failure = error
            assert failure is not None
            raise failure

        try:
            return deterministic_run(body, seed=seed)
        except BaseException as error:
            error.add_note(f"in wan(hosts={hosts}, profile={profile!r}, seed={seed!r})")
            raise
