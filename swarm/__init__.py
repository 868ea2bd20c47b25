"""The network: what peers say to each other, and what they may believe.

Imports neither torch nor vLLM. `node` and `coordinator` are built on top of it and never on each
other; the import contracts in `pyproject.toml` hold that line.
"""
