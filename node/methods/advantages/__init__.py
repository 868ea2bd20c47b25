"""Advantages of completions. Pure functions of whole batches."""
