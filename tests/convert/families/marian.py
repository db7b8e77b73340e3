"""Small Marian models, and what no Marian model can be."""

from tests.convert.families.bart_lineage import (
    IMPOSSIBLE,
    REFUSED,
    ids,
    one_head_unscaled,
    seven_heads,
    sinusoids,
    three_heads,
)
from tests.convert.families.case import Case

CASE = Case(
    shapes={
        "three_heads": three_heads(activation_function="swish", **ids(pad=52, eos=0)),
        "one_head_unscaled": one_head_unscaled(**ids(pad=5, eos=11)),
        "two_tables": seven_heads(
            decoder_vocab_size=47,
            activation_function="relu",
            share_encoder_decoder_embeddings=False,
            **ids(pad=41, eos=3),
        ),
    },
    refused=REFUSED
    | {
        "vocab_size": 54,
        "decoder_vocab_size": 54,
        "share_encoder_decoder_embeddings": 1,
    },
    required=("d_model", "pad_token_id", "scale_embedding", "vocab_size"),
    impossible=(*IMPOSSIBLE, {"norm_placement": "pre"}, {"final_norm": True}),
    tables={"embed_positions.weight": sinusoids},
)
