"""Where what a stranger wrote is scored or run: no network, hardly a file, no other process."""
