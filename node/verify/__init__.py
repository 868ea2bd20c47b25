"""Assignment of tasks to nodes, and rewards of own and foreign completions."""
