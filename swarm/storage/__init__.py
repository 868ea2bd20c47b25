"""Files that survive a crash: atomic, locked, private."""
