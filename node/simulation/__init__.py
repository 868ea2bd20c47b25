"""Nodes, learners and workers on simulated links, and scenarios for them."""
