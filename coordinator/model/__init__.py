"""The capacity model: a learner's needs, its supply, and the workers that suffice. Pure."""
