"""A decoder-only Gemma as an encoder-decoder, to be trained (Zhang et al. 2025, arXiv 2504.06225).

Both stacks have the decoder's weights, and cross-attentions have those of the self-attentions.
Left out: stacks of unequal sizes, images, and the training itself.
"""

import os
import re
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families import get_family
from jax_transformer.convert.families.family import config_from_json
from jax_transformer.convert.table import Layout, Operation, Row, expand
from jax_transformer.convert.transfer import jax_leaf, to_params
from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.reading import read_json
from jax_transformer.storage.weights.shards import read_weights

FAMILIES = {"gemma2": "t5gemma", "gemma3_text": "t5gemma2"}
# Names of Gemma by those of the encoder-decoder.
NAMES = (
    (r"lm_head\.out_proj", "model.embed_tokens"),
    (r"model\.(encoder|decoder)\.", "model."),
    ("cross_attn", "self_attn"),
    ("pre_self_attn_layernorm", "input_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm"),
)


def adapt(
    folder: str | os.PathLike[str], *, dtype: str | None = None
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the config and the parameters of an encoder-decoder made of a Gemma's folder.

    Args:
        folder: A folder of Gemma 2, which becomes a T5Gemma, or of the text of Gemma 3, which
            becomes a T5Gemma 2.
        dtype: Floating-point type to convert the weights to; None keeps their type.

    Raises:
        InputError: The folder is of another model; or as `from_huggingface`.
    """
    folder = Path(folder)
    values = read_json(folder / CONFIG_FILE)
    if (kind := values.get("model_type")) not in FAMILIES:
        raise InputError(
            f"{folder}: model_type={kind!r:.60} must be {' or '.join(FAMILIES)}: only a Gemma's "
            "decoder becomes an encoder-decoder"
        )
    family = get_family(FAMILIES[kind])
    encoder = values if kind == "gemma2" else {"text_config": values}
    config = config_from_json(family, {"encoder": encoder, "decoder": values})
    paths: dict[str, dict[str, Operation]] = {}
    for row in expand(family.layout, config):
        name = row.foreign
        for ours, theirs in NAMES:
            name = re.sub(ours, theirs, name)
        paths.setdefault(name, {})[row.paths[0]] = row.operation
    rows = []
    for name, found in paths.items():
        stack = "rows" if len(found) == 1 else "copies"
        rows.append(Row(name, (*found,), next(iter(found.values())), stack=stack))
    tensors = read_weights(folder)
    if values.get("tie_word_embeddings", True):
        tensors.pop("lm_head.weight", None)  # a copy of the table
    layout = Layout(kind, tuple(rows))
    params, _ = to_params(tensors, config, layout, dtype=dtype, leaf=jax_leaf(), consume=True)
    return config, params
