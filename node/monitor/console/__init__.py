"""Live views in a terminal."""
