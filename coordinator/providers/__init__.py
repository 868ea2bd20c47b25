"""Where workers come from."""
