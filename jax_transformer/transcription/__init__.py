"""Sounds to text: windows, segments, and the files that players of films read."""
