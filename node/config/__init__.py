"""Settings of a run, which all its nodes share, and of a node; validated at start."""

from node.config.load import DEFAULT_RUN, load_config, load_run, packaged_runs, run_argument
from node.config.node import NodeConfig
from node.config.run import RunConfig

__all__ = [
    "DEFAULT_RUN",
    "NodeConfig",
    "RunConfig",
    "load_config",
    "load_run",
    "packaged_runs",
    "run_argument",
]
