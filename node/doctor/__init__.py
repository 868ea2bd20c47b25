"""Whether this machine can be a node, and what works from it: one line each."""
