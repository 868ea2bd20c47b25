"""Rounds of SAPO, the learner's steps, the worker's leases, and the roles that compose them."""
