"""Checks of a simulated run: invariants, bounds, deliveries."""
