"""`jax-transformer prepare`: encode the text of a training once, before the training."""

import sys

from rich.console import Console

from jax_transformer.commands.train import check_values
from jax_transformer.commands.train_arguments import named_settings, new_arguments
from jax_transformer.errors import InputError
from jax_transformer.runs.corpora import encode_corpora, read_corpora, try_corpora


def prepare(*argv: str) -> None:
    """Parse the command line and prepare the text."""
    # The report alone goes to standard output.
    console = Console(markup=False, highlight=False, soft_wrap=True, file=sys.stderr)
    named = named_settings(argv, "prepare")
    arguments, initial = new_arguments(named)
    check_values(arguments, initial)
    if (bands := arguments.model["source_features"]) is not None:
        raise InputError(f"source_features={bands}: sounds are read while a model is trained")
    run_text = read_corpora(arguments, initial.tokenizer, console)
    if named.dry_run:
        print("\n".join(try_corpora(run_text, arguments, console)))
        return
    print("\n".join(encode_corpora(run_text, arguments, console).report))
    print(f"kept in {arguments.store}; train with the same arguments")
