"""Feeding a central learner: leases, submissions, and the staleness bound."""
