"""Train a translation model: `python train.py` alone, or with four text files; see --help.

Without files the task is the embedded one, English number words to German ones.
"""

import dataclasses
import itertools
import sys
import time
from pathlib import Path

import tyro
from rich.console import Console

from jax_transformer import evaluate
from jax_transformer.config import TransformerConfig
from jax_transformer.data import number_words
from jax_transformer.data.batches import encode_corpus
from jax_transformer.data.corpus import ParallelCorpus, read_parallel
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.decoding import check_generates
from jax_transformer.errors import InputError
from jax_transformer.training import checkpoint, loop
from jax_transformer.training.config import TrainingConfig
from jax_transformer.translation import translate

SAMPLES = 5  # translations printed at the end


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a Transformer to translate, and write a checkpoint for `jax-transformer translate`.

    Without files the task is the embedded one, and the defaults are made for it; with --source
    they are made for some ten thousand sentences, and `--source FILE --help` shows them.
    """

    source: Path | None = None
    """Training text, one sentence a line, plain or gzip."""

    target: Path | None = None
    """Its translation, line beside line."""

    valid_source: Path | None = None
    """Text that is held out, to choose the best parameters and to be translated at the end."""

    valid_target: Path | None = None
    """Its translation, line beside line."""

    output: Path | None = None
    """Directory of the checkpoint; if None, the first free one of runs/0, runs/1, ..."""

    overwrite: bool = False
    """Replace the checkpoint that is at --output."""

    preset: str = "vaswani2017"
    """The described implementation to train; the sizes below are set in it."""

    vocab_size: int = 6000
    """Entries of the byte-pair encoding that both languages share."""

    d_model: int = 256
    """Width of the residual stream."""

    num_heads: int = 8
    """Attention heads."""

    d_ff: int = 512
    """Inner width of the feed-forward networks."""

    num_encoder_layers: int = 3
    """Layers of the encoder."""

    num_decoder_layers: int = 3
    """Layers of the decoder."""

    dropout: float = 0.1
    """Dropout rate, wherever the preset drops."""

    max_length: int = 128
    """Most tokens of a sentence; a training pair with a longer one is dropped and counted."""

    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)


NUMBER_WORDS = Arguments(
    vocab_size=90,
    d_model=64,
    num_heads=4,
    d_ff=256,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dropout=0.0,
    max_length=64,
    training=TrainingConfig(
        steps=1000,
        warmup_steps=200,
        learning_rate_factor=0.5,
        label_smoothing=0.0,
        token_budget=1536,
        bucket_count=4,
        evaluation_interval=250,
    ),
)


def main() -> None:
    """Parse the command line and train; an input error is one line and exit code 1."""
    text = any(argument.split("=")[0] == "--source" for argument in sys.argv[1:])
    arguments = tyro.cli(
        Arguments,
        default=Arguments() if text else NUMBER_WORDS,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    try:
        run(arguments)
    except InputError as error:
        sys.exit(f"error: {error}")


def run(arguments: Arguments) -> None:
    """Read, train, write the checkpoint, translate the held-out text."""
    started = time.monotonic()
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if arguments.output:
        checkpoint.check_free(arguments.output, arguments.overwrite)
    arguments.training.check()

    training, validation = read_corpora(arguments)
    tokenizer = Tokenizer.train(training.sources + training.targets, arguments.vocab_size)
    config = model_config(arguments, tokenizer)
    training_ids = encode_corpus(training, tokenizer, config.max_length)
    validation_ids = encode_corpus(validation, tokenizer, config.max_length)
    if validation_ids.dropped_overlong:
        raise InputError(
            f"max_length={config.max_length} is too short for {validation_ids.dropped_overlong:,} "
            f"of {len(validation.sources):,} validation pairs; raise it or leave them out"
        )
    console.print(f"training: {training.report()}; {training_ids.report()}")
    console.print(f"validation: {validation.report()}; {validation_ids.report()}")

    best = loop.train(config, arguments.training, training_ids, validation_ids, console)
    trained = checkpoint.Checkpoint(config, tokenizer, best.params)
    output = arguments.output or first_free_run()
    checkpoint.save(output, trained, arguments.overwrite)
    console.print(f"checkpoint of step {best.step:,} written to {output}")

    hypotheses = translate(trained, validation.sources, console=console)
    translations = [best.text for best, *_ in hypotheses]
    triples = list(zip(validation.sources, translations, validation.targets, strict=True))
    for source, translation, reference in triples[:: -(-len(triples) // SAMPLES)]:
        console.print(f"  {source}\n    {translation}\n    ({reference})")
    if arguments.source:
        console.print(evaluate.bleu(translations, validation.targets))
    else:
        share = evaluate.exact_match(translations, validation.targets)
        console.print(f"exact match on {len(translations):,} held-out numbers: {share:.2%}")
    console.print(f"wall time, compilation included: {time.monotonic() - started:.0f} s")


def read_corpora(arguments: Arguments) -> tuple[ParallelCorpus, ParallelCorpus]:
    """Return the training and the held-out pairs: of the four files, or the number words.

    Raises:
        InputError: Some of the files are not named, or cannot be used.
    """
    names = ("source", "target", "valid_source", "valid_target")
    paths = [getattr(arguments, name) for name in names]
    if not any(paths):
        return number_words.corpus(arguments.training.seed)
    for name, path in zip(names, paths, strict=True):
        if path is None:
            raise InputError(f"{name}=None: name all four of {', '.join(names)}, or none")
    return read_parallel(*paths[:2]), read_parallel(*paths[2:])


def model_config(arguments: Arguments, tokenizer: Tokenizer) -> TransformerConfig:
    """Return the shape of the model.

    Raises:
        InputError: A size is wrong, or the preset is no model of token ids.
    """
    config = TransformerConfig.preset(
        arguments.preset,
        src_vocab_size=tokenizer.vocab_size,
        tgt_vocab_size=tokenizer.vocab_size,
        d_model=arguments.d_model,
        num_heads=arguments.num_heads,
        d_ff=arguments.d_ff,
        num_encoder_layers=arguments.num_encoder_layers,
        num_decoder_layers=arguments.num_decoder_layers,
        dropout=arguments.dropout,
        max_length=arguments.max_length,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )
    check_generates(config)
    return config


def first_free_run() -> Path:
    """Return the first of runs/0, runs/1, ... that does not exist."""
    runs = (Path("runs") / str(number) for number in itertools.count())
    return next(run for run in runs if not run.exists())


if __name__ == "__main__":
    main()
