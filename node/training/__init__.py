"""The trainer, in a process of its own: specified, planned, fed, asked."""
