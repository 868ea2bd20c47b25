"""A hostile peer, and all that it can tell."""
