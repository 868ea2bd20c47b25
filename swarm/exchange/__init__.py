"""Rollout groups from node to node: offered, chosen, fetched, verified, kept."""
