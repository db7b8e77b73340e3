"""MetricX-23 and MetricX-24 (Juraska et al. 2023, 2024): an mT5 that judges translations."""

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jax_transformer.convert.huggingface import from_huggingface, load_tokenizer, read_config
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import apply
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.pools import padded_length, padded_rows

FAMILY = "mt5"
SCORE_ID = 250_089  # <extra_id_10>, whose logit at the first decoded position is the score
WORST = 25.0
LONGEST = {23: 1024, 24: 1536}  # tokens of an input, EOS included; more are cut off
# What a version reads of a line, with references and without them.
READS = {(23, True): ("candidate", "reference"), (23, False): ("candidate", "source")}
READS |= {(24, True): ("source", "candidate", "reference"), (24, False): ("source", "candidate")}
MAX_TOKENS = 4096  # of a batch, padding included

Judge = Callable[[Sequence[str]], Float32[np.ndarray, " lines"]]


def inputs(
    version: int, translations: Sequence[str], references: Sequence[str], sources: Sequence[str]
) -> list[str]:
    """Return what a version reads of each line; without references, it judges by the sources."""
    names = READS[version, bool(references)]
    if "source" in names and not sources:
        raise InputError(f"sources=None: MetricX-{version} reads them; name their file")
    texts = {"candidate": translations, "reference": references, "source": sources}
    lines = zip(*(texts[name] for name in names), strict=True)
    return [" ".join(map("{}: {}".format, names, line)) for line in lines]


def load_metricx(folder: Path, version: int, tokenizer_folder: Path | None = None) -> Judge:
    """Return the function of a published folder: from `inputs` to scores, 0 (the best) to 25.

    Args:
        folder: The folder of an MT5ForRegression.
        version: 23 or 24.
        tokenizer_folder: The folder of the mT5 that has the tokenizer; None is `folder`.

    Raises:
        InputError: The model is of another base or lacks the output matrix; or as `load`.
    """
    values = read_config(folder)
    if (found := values.get("model_type")) != FAMILY:
        raise InputError(
            f"{folder}: model_type={found!r:.40} is no MetricX-23 or MetricX-24, which are "
            f"{FAMILY}; another base, for example that of MetricX-25, cannot be read"
        )
    config, params = from_huggingface(folder)
    if config.output_projection == "tied" or config.tgt_vocab_size <= SCORE_ID:
        fault = f"has no output matrix of its own with the row {SCORE_ID}"
        raise InputError(f"{folder}: {fault}; name the folder of a MetricX")
    tokenizer = load_tokenizer(tokenizer_folder or folder)[1]
    model = TrainedModel(config, params, tokenizer, {})
    config = model.with_max_length(LONGEST[version], str(folder)).config
    # The published class scales hidden states where config.json says that the tables are tied.
    scale = config.d_model**-0.5 if values.get("tie_word_embeddings") else 1.0
    logits = jax.jit(lambda params, *ids: apply(params, config, *ids)[:, 0, SCORE_ID])

    def judge(lines: Sequence[str]) -> Float32[np.ndarray, " lines"]:
        # The inputs of the published program end without EOS.
        rows = [ids[:-1] for ids in tokenizer.encode_source(lines, config.max_length)]
        scores = np.zeros(len(rows), np.float32)
        order = sorted(filter(rows.__getitem__, range(len(rows))), key=lambda row: -len(rows[row]))
        for length, places in groupby(order, lambda row: padded_length(len(rows[row]), config)):
            count = MAX_TOKENS // length
            while members := [*islice(places, count)]:
                src = padded_rows([rows[row] for row in members], count, length, config)
                first = np.full((count, 1), config.bos_id, np.int32)
                found = logits(params, jnp.asarray(src, jnp.int32), first)
                scores[members] = np.asarray(found, np.float32)[: len(members)]
        if (bad := np.flatnonzero(~np.isfinite(scores))).size:
            fault = f"{folder}: the score of line {bad[0] + 1} is {scores[bad[0]]}"
            raise InputError(f"{fault}; its weights are damaged, copy the folder again")
        return np.clip(scores * np.float32(scale), 0, WORST)

    return judge
