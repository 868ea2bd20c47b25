"""What is seen of a node or a network: status, alarms, metrics, telemetry, a broker."""
