"""A node as a service of the user's: it starts with the machine and comes again where it fails."""
