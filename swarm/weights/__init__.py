"""Versions of a policy, from a publisher to everybody who uses them."""
