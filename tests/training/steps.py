"""The training step of a run, compiled once for each pair of settings."""

import functools

import jax

from jax_transformer.training.step import make_run_step


@functools.cache
def run_step(config, settings):
    """Return the step of a run on one device; the state handed in is donated."""
    return jax.jit(make_run_step(config, settings), donate_argnames="state")
