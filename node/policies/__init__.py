"""A policy as a torch model: built, saved, adapted, lent to an engine."""
