"""A wide-area network in one process, for tests: hosts, links, faults, a seeded scheduler."""
