"""The format of a version: manifests, tensors, deltas, chunks."""
