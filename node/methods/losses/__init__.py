"""Token losses, and corrections for stale data. Pure functions."""
