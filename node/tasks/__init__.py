"""Environments: where prompts, answers and rewards come from."""
