"""What subcommands of `swarm-node` run that are no node."""
