"""`python train.py ...` is `jax-transformer train ...`, from a checkout; see --help."""

import sys

from jax_transformer.commands.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
