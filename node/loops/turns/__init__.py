"""Completions of several turns, from the first one to the end of each transcript."""
