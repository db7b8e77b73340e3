"""Parity of models that are not of this library."""
