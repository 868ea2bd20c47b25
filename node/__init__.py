"""One machine in the swarm: its policy, trainer and engine, and what ties them to the network."""
