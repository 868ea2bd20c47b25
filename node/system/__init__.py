"""Machine, processes, and small concurrency tools."""
