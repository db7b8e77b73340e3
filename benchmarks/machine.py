"""What the machine reaches at most, as systems to time in turn with others."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp

Limit = Callable[..., None]  # of any task, the same work

PRODUCT_SIZE = 2048  # rows and columns of the matrices that are multiplied
PRODUCTS = 4  # of a call
TRIAD_SIZE = 2**26  # numbers of a vector, many times what caches hold
TRIADS = 10  # of a call


def load_product() -> Limit:
    """Return large float32 products as XLA makes them."""
    product = jax.jit(jnp.matmul)
    matrix = jax.random.normal(jax.random.key(0), (PRODUCT_SIZE, PRODUCT_SIZE))

    def run(*_: object) -> None:
        for _ in range(PRODUCTS):
            product(matrix, matrix).block_until_ready()

    return run


def load_torch_product() -> Limit:
    """Return large float32 products as torch makes them."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE)
    result = torch.empty_like(matrix)

    def run(*_: object) -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=result)

    return run


def load_triad() -> Limit:
    """Return sums of large float32 vectors, a + b * number, in place of the first."""
    triad = jax.jit(lambda a, b: a + 0.5 * b, donate_argnums=0)
    a, b = jnp.zeros(TRIAD_SIZE), jnp.ones(TRIAD_SIZE)

    def run(*_: object) -> None:
        nonlocal a
        for _ in range(TRIADS):
            a = triad(a, b).block_until_ready()

    return run


PRODUCT_LOADERS = {"product by XLA": load_product, "product by torch": load_torch_product}
LOADERS = PRODUCT_LOADERS | {"triad": load_triad}
# What a call does: FLOPs of products, bytes read and written of triads.
AMOUNTS = dict.fromkeys(PRODUCT_LOADERS, PRODUCTS * 2 * PRODUCT_SIZE**3)
AMOUNTS["triad"] = TRIADS * 3 * 4 * TRIAD_SIZE
