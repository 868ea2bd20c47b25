"""vLLM as a server of its own, and how a node talks to it."""
