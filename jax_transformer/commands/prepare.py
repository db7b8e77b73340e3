"""`jax-transformer prepare`: encode the text of a training once, before the training."""

import sys

from rich.console import Console

from jax_transformer.commands.train import check_values
from jax_transformer.commands.train_arguments import check_start, named_settings, read_start
from jax_transformer.runs.corpora import encode_corpora, read_corpora, try_corpora

DRY_RUN = "--dry-run"
HELP = f"""usage: jax-transformer prepare [{DRY_RUN}] [arguments of jax-transformer train]

Encodes the training text as `jax-transformer train` with the same arguments would do before its
first step, and keeps it in the folder --prepared. With {DRY_RUN} nothing is kept of the text; the
report says what would be. Arguments that do not concern the text change nothing.
"""


def prepare(*argv: str) -> None:
    """Parse the command line and prepare the text."""
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return
    others = [argument for argument in argv if argument != DRY_RUN]
    # The report alone goes to standard output.
    console = Console(markup=False, highlight=False, soft_wrap=True, file=sys.stderr)
    named = named_settings(others)
    start = read_start(named.arguments())
    arguments = named.arguments(start)
    check_start(arguments, start)
    check_values(arguments, start)
    settings = arguments.text_settings()
    run_text = read_corpora(settings, start.tokenizer, console)
    if DRY_RUN in argv:
        print("\n".join(try_corpora(run_text, settings, console)))
        return
    print("\n".join(encode_corpora(run_text, settings, console).report))
    print(f"kept in {settings.store}; train with the same arguments")
