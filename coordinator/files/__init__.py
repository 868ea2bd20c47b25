"""What people write: the fleet file and the plan file, and how tables of TOML are read."""
