"""Checks of this machine as a node: one line each."""
