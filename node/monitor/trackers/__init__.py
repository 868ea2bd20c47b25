"""A node's figures, told to a tracker of experiments."""
