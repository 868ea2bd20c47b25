"""Files of models: converted, checked before a model counts as loaded; templates rendered."""
