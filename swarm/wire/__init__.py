"""What peers say to each other: every message, and the codec that judges foreign bytes."""
