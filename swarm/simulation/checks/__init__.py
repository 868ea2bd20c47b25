"""What must hold whatever goes wrong: invariants, bounds, deliveries."""
