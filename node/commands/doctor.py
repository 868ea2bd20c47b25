"""`swarm-node doctor`: what works from this machine, under these settings."""

from collections.abc import Callable
from importlib.util import find_spec

from node.config import NodeConfig
from node.doctor.doctor import examine
from node.doctor.runs import show_runs
from node.hosting.models import resolved_model, trainer_spec
from node.roles.machine import RealNetwork


def list_runs(config: NodeConfig, say: Callable[[str], None]) -> int:
    """Say which runs the peers of these settings take part in. Returns the exit status."""
    return show_runs(config, say, RealNetwork().now_s)


def examine_here(config: NodeConfig, say: Callable[[str], None]) -> int:
    """Say what works from here. Returns the exit status."""
    is_worker = config.run.learner is not None and config.role == "worker"
    spec = None
    trains = not is_worker and config.engine != "openai"
    if trains and find_spec("torch") is not None:  # else said among the findings
        spec = trainer_spec(config, resolved_model(config)[0])
    return examine(config, spec, say, RealNetwork().now_s)
