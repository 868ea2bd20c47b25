"""What a run and a node are told, by files, flags and environment variables: one frozen tree of
settings, validated at start. A run is one training effort, which all its nodes share."""

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
