"""Versions and chunks on disk, and the cheapest way from one version to the next."""
