"""The wire: every message, and the codec that judges foreign bytes."""
