"""The subcommands of `swarm-node`, one file for each subject."""
