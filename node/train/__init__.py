"""One update of a policy: rows, memory, the trainer and its process."""
