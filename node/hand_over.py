"""What happens between a trainer and an engine of its own around each update.

Where both are on one GPU, the engine sleeps while the trainer trains, and takes the new weights
from the trainer's own memory; elsewhere through files in shared memory. The files are written in
both cases: what an engine starts from when it died, and goes back to when it does not take the next
version.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from node.engines.policy_files import PolicyFiles
from node.engines.vllm_engine import VllmEngine
from node.training.process import TrainerProcess
from swarm.errors import ChildFailed

HAND_OVERS_MAX: Final = 3  # failures in a row; then trainer and engine are started again


class EngineHandOver:
    """See `node.sapo.HandOver`.

    An engine that does not take a policy serves the one before for another round: what it samples
    says so, and the next policy is given to it again.
    """

    def __init__(
        self,
        trainer: TrainerProcess,
        engine: VllmEngine,
        files: PolicyFiles,
        tell: Callable[[str], Awaitable[None]],
        *,
        shares_device: bool = False,
        sleeps: bool = False,
    ) -> None:
        """`shares_device`: trainer and engine are on one, so that weights can be lent. `sleeps`:
        the engine gives its memory to the trainer while this trains."""
        self._trainer, self._engine, self._files, self._tell = trainer, engine, files, tell
        self._shares_device, self._sleeps = shares_device, sleeps
        self._failures = 0  # in a row

    async def before_training(self) -> None:
        """See `HandOver`. An engine that fails at sleeping stays awake from then on."""
        if not self._sleeps:
            return
        try:
            await self._engine.sleep()
        except ChildFailed as error:
            self._sleeps = False
            await self._tell(f"the engine keeps its memory while the trainer trains: {error}")

    async def after_training(self, policy_version: int) -> float:
        """See `HandOver`.

        Raises:
            ChildFailed: `HAND_OVERS_MAX` of them in a row failed.
        """
        directory = await self._files.export(self._trainer, policy_version)
        lent = False
        if self._shares_device:
            lent = await self._trainer.lend(directory)
            await self._trainer.release()
        try:
            await self._engine.load(directory, policy_version, lent=lent)
        except ChildFailed as error:
            self._failures += 1
            if self._failures >= HAND_OVERS_MAX:
                raise
            await self._tell(f"the engine did not take version {policy_version}: {error}")
        else:
            self._failures = 0
        await self._files.keep_only(self._engine.directory)
        return self._engine.paused_s
