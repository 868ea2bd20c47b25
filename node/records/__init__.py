"""Records of a node's work, and the wording of figures."""
