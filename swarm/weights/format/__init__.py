"""What a version is: manifests, tensors, deltas, chunks."""
