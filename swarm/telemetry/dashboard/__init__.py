"""The page of a swarm: served from a thread of its own, made from reports."""
