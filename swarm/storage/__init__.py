"""Files that survive a crash and belong to one owner: whole or not there, locked, private."""
