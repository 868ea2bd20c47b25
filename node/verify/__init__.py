"""Which tasks a node has, and the rewards of own and foreign completions."""
