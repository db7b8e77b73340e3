"""A training run that may be killed at any moment and resumed."""
