"""`python -m jax_transformer` is `jax-transformer`."""

from jax_transformer.commands.main import main

main()
