"""Porting a model that nobody published: what it computes, beside the model in JAX."""
