"""Weights over the swarm: signed manifests, content-addressed chunks, deltas, broadcast."""
