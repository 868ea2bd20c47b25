"""Engines, which sample completions: vLLM, a small torch engine, a served model, a script."""
