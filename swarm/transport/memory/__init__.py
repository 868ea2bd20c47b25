"""Simulated links in one process, under a virtual clock."""
