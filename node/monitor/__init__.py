"""Watching of nodes: status, alarms, metrics, telemetry, reports, a broker."""
