"""A training run on the embedded task, in both frameworks side by side."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import torch

import torch_reference
from jax_transformer import TransformerConfig, convert, generate, init_params, pad
from jax_transformer.text import number_words
from jax_transformer.text.batches import Batch, training_batches
from jax_transformer.text.encoding import encode_text
from jax_transformer.text.plan import plan_epoch
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from tests.models import unchecked
from tests.parity.measure import Pair, Trained, train

LONGEST = 40  # most tokens of a translation


class Run(NamedTuple):
    """Both models after training, and what they make of numbers that neither has seen."""

    trained: Trained
    sources: Sequence[str]
    references: Sequence[str]
    our_translations: list[str]
    their_translations: list[str]


def train_both(
    config: TransformerConfig, batches: list[Batch], settings: TrainingConfig
) -> tuple[Trained, torch_reference.Transformer]:
    """Train in float64 from one initialization; return with both the module of torch."""
    params = init_params(jax.random.key(settings.seed), config)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    module = torch_reference.Transformer(config).double()
    return train(Pair(config, params, module), batches, settings), module


def run(config: TransformerConfig, settings: TrainingConfig, held_out: int) -> Run:
    """Train in float64 from one initialization on the same batches; translate greedily.

    Args:
        config: The shape of the model; the size of the vocabulary is what the tokenizer needs.
        settings: Steps, batches and optimizer.
        held_out: How many of the held-out numbers are translated.
    """
    training, validation = number_words.corpus(settings.seed)
    tokenizer = train_byte_pair(training.sources + training.targets, config.src_vocab_size)
    corpus = encode_text(training, tokenizer, config.max_length)
    batches = itertools.chain.from_iterable(
        training_batches(corpus, plan_epoch(corpus, settings, epoch)) for epoch in itertools.count()
    )
    trained, module = train_both(config, [*itertools.islice(batches, settings.steps)], settings)
    sources, references = (
        side[:: len(side) // held_out] for side in (validation.sources, validation.targets)
    )
    src = pad(tokenizer.encode_source(sources), config.pad_id)
    ours = generate(trained.ours, config, src, max_new_tokens=LONGEST)
    module.load_state_dict(convert.to_torch(trained.theirs, config))
    with unchecked():
        theirs = torch_reference.generate(
            module.eval(), torch.from_numpy(src).long(), max_new_tokens=LONGEST
        )
    translations = [
        [
            tokenizer.decode(row[:length].tolist())
            for row, length in zip(
                np.asarray(one.tokens)[:, 0], np.asarray(one.lengths)[:, 0], strict=True
            )
        ]
        for one in (ours, theirs)
    ]
    return Run(trained, sources, references, *translations)
