"""Trained models for programs that know nothing of this library; each export proves itself."""
