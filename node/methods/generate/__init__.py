"""The decisions of generation methods, without an engine."""
