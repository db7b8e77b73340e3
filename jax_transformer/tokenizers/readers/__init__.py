"""Readers of tokenizers: one for each format of files, and one for each family of transformers."""
