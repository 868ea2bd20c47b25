"""Environments make prompts, answers and rewards. `node.verification` assigns tasks to nodes."""
