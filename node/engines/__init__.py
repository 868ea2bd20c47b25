"""What samples completions: vLLM, a small torch engine, or a script."""
