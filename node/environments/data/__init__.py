"""Questions and answers that somebody brought along: read, kept by their hash, scored by name."""
