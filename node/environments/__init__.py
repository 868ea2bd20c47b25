"""Where prompts, answers and rewards come from. Which tasks a node has: `node.verification`."""
