"""What the machine and its processes give a node, and small tools of structured concurrency."""
