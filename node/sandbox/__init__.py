"""Sandbox for strangers' code and text: no network, few files, no other process."""
