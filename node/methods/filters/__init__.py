"""Which groups, completions and tokens are learned from, and what is put in their place."""
