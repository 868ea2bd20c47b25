"""What a node writes down of its work, and how figures are worded."""
