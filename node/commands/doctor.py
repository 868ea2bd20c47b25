"""`swarm-node doctor`: what works from this machine, under these settings."""

from collections.abc import Callable

from node.config import NodeConfig
from node.doctor.doctor import examine
from node.hosting.models import resolved_model, trainer_spec
from node.roles.machine import RealNetwork


def examine_here(config: NodeConfig, say: Callable[[str], None]) -> int:
    """Say what works from here. Returns the exit status."""
    model, _ = resolved_model(config)
    is_worker = config.run.learner is not None and config.role == "worker"
    spec = None if is_worker else trainer_spec(config, model)
    return examine(config, spec, say, RealNetwork().now_s)
