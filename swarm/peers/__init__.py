"""Peers: discovery, addresses, admission, reputation."""
