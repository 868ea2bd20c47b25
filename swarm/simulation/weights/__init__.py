"""Broadcasts of weights on simulated links."""
