"""Assignment of tasks, and the scoring of answers in a process of its own."""
