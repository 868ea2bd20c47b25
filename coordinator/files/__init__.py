"""The files that people write: the fleet file and the plan file, and the reader of their TOML."""
