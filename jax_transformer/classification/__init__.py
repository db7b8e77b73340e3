"""Texts to labels: a classifier of a folder as a function of strings."""
