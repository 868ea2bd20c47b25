"""What a trainer makes small: token losses, and corrections for stale data. Pure functions."""
