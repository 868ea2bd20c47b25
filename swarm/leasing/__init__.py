"""Feeding a central learner: leases, the staleness bound, submissions, the coordinator's plans."""
