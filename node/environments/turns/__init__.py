"""Environments that answer: games, tools, and how what they said is worked out again."""
