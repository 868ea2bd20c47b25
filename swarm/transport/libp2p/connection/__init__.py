"""One connection, from Noise to its streams."""
