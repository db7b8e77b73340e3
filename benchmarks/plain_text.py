"""Rows and speeds of plain text: python -m benchmarks.plain_text --source FILE --target FILE.

Plans and reads one epoch of the same lines as pairs and by each objective, packed, and prints the
tokens a second of CPU time of one thread, and the share of padding.
"""

import dataclasses
import time
from pathlib import Path

import tyro

from jax_transformer.text.batches import make_batch, padding_share
from jax_transformer.text.denoising import (
    MODE_TOKENS,
    OBJECTIVES,
    SENTINEL,
    Objective,
    special_ids,
)
from jax_transformer.text.encoding import encode_text
from jax_transformer.text.parallel_text import Text, read_text
from jax_transformer.text.plan import plan_epoch
from jax_transformer.tokenizers import train_unigram
from jax_transformer.training.config import TrainingConfig

SPECIAL = [*(SENTINEL.format(number) for number in range(100)), *MODE_TOKENS]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Which text.

    Attributes:
        source: Lines.
        target: Their translations.
        pairs: How many of them.
        vocab_size: Entries of the tokenizer.
    """

    source: Path
    target: Path
    pairs: int = 8000
    vocab_size: int = 3000


def main(arguments: Arguments) -> None:
    """Measure and print."""
    text = read_text(arguments.source, arguments.target)
    sources, targets = (side[: arguments.pairs] for side in (text.sources, text.targets))
    tokenizer = train_unigram([*sources, *targets], arguments.vocab_size, special_tokens=SPECIAL)
    for length in (128, 512):
        settings = TrainingConfig(batching="packed", pack_length=length, max_tokens=8192)
        corpora = {"translation": encode_text(Text(sources, targets), tokenizer, length)}
        for name, denoisers in OBJECTIVES.items():
            prefixes = tokenizer.encode_text([denoiser.prefix for denoiser in denoisers])
            special = special_ids(tokenizer, name, "tokenizer")
            objective = Objective(denoisers, tuple(map(tuple, prefixes)), special, length, 0)
            plain = encode_text(Text(sources + targets), tokenizer, length)
            corpora[name] = plain.with_objective(objective)
        for name, corpus in corpora.items():
            start = time.process_time()
            plan = plan_epoch(corpus, settings, 0)
            batches = (make_batch(corpus, planned) for planned in plan)
            tokens = sum(int((b.src > 0).sum() + (b.tgt_out > 0).sum()) for b in batches)
            speed = tokens / (time.process_time() - start)
            padding = padding_share(corpus, plan[:-1])
            print(f"rows of {length}, {name}: {speed:,.0f} tokens/s, {padding:.2%} padding")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
