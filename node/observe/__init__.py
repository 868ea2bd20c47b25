"""Records of a node, and all that shows them: log, status, alarms, reports, terminal, metrics."""
