"""What a learner needs of its workers, what it gets, and which workers suffice. Pure."""
