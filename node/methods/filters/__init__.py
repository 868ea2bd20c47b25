"""Selection of groups, completions and tokens to learn from, and replacements for the others."""
