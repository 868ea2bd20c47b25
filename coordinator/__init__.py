"""Optional control plane. A swarm runs without it."""
