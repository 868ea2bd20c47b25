"""Files of models: what is converted, and what is checked before a model counts as loaded."""
