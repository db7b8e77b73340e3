"""How much of a validation text a model restores: tokens of the targets of denoising examples."""

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import generate
from jax_transformer.model.transformer import Params
from jax_transformer.text.batches import pad
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.plan import BatchSettings, plan_epoch

EXAMPLES = 64  # of each denoiser, at most


def restored_shares(
    params: Params, config: TransformerConfig, validation: Corpus, settings: BatchSettings
) -> dict[str, float]:
    """Return, for each denoiser, the share of its target tokens that greedy search gives.

    A token counts if it stands at its place; EOS is one. The examples are the same at each call.
    """
    shares = {}
    for task, corpus in validation.by_task().items():
        if not corpus.has_texts:
            continue
        pieces = plan_epoch(corpus, settings, 0)[0].pieces[:EXAMPLES]
        sides = corpus.read_pieces(pieces).sides()
        sources, targets = ([ids.tolist() for ids in side] for side in zip(*sides, strict=True))
        longest = max(map(len, targets)) - 1  # BOS is given
        src = pad(sources, config.pad_id)
        found = generate(params, config, src, max_new_tokens=longest, beam_size=1)
        tokens = np.asarray(found.tokens)[:, 0]
        expected = pad([target[1:] for target in targets], -1, tokens.shape[1])
        shares[task] = float((tokens == expected).sum() / (expected >= 0).sum())
    return shares
