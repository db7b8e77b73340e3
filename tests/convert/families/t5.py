"""Small models of T5, T5 v1.1 and the shape of ByT5, and what no T5 can be."""

from tests.convert.families.case import Case
from tests.convert.families.t5_lineage import (
    IMPOSSIBLE,
    REFUSED,
    REQUIRED,
    finish,
    one_head,
    seven_heads,
    three_heads,
)

CASE = Case(
    shapes={
        "tied": three_heads(decoder_start_token_id=0),
        "v1_1": one_head(
            decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False
        ),
        "tied_unscaled": seven_heads(
            feed_forward_proj="gated-silu", scale_decoder_outputs=False, layer_norm_epsilon=1e-5
        ),
    },
    refused=REFUSED,
    required=REQUIRED,
    impossible=(*IMPOSSIBLE, {"relative_attention_bias": "per_layer"}),
    finish=finish,
    float32=("wo.weight",),
)
