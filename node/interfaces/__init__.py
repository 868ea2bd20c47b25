"""What the parts of a node ask of each other: engines, trainers, adapters. Free of torch."""
