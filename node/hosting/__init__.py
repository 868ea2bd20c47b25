"""The policy that a node hosts: where it comes from, its versions on disk, its engine."""
