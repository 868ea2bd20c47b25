"""Where prompts, answers and rewards come from."""
