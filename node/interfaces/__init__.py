"""Interfaces between the parts of a node: engines, trainers, adapters. Free of torch."""
