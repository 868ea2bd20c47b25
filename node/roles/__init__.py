"""The composition: what a node, a learner and a worker each need, built and taken down in order."""
