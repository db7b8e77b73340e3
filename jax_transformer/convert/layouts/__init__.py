"""Tensor names of other programs: one layout is one table."""
