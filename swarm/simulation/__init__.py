"""A wide-area network in one process: hosts, links, faults, a seeded scheduler."""
