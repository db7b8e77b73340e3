"""IndicTransForConditionalGeneration: IndicTrans2, languages of India (Gala et al. 2023).

Its class is code that comes with the published weights: the layers of M2M100 with a norm of the
embeddings, a table for each side, and other names in config.json.
"""

from jax_transformer.convert.families import bart_lineage, m2m_100
from jax_transformer.convert.families.family import (
    ENCODER_DECODER,
    flag,
    generation_without_forced_end,
)

_WIDTHS = dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), "d_model")
_LENGTHS = dict.fromkeys(("max_source_positions", "max_target_positions"), "max_length")

FAMILY = bart_lineage.family(
    "IndicTrans",
    "IndicTransForConditionalGeneration",
    "m2m100",
    layout=bart_lineage.layout("IndicTrans", m2m_100.POSITIONS, "weights"),
    generation=generation_without_forced_end,
    fields={
        "encoder_vocab_size": "src_vocab_size",
        "decoder_vocab_size": "tgt_vocab_size",
        **_WIDTHS,
        **_LENGTHS,
        **{k: v for k, v in bart_lineage.FIELDS.items() if v not in ("d_model", "max_length")},
    },
    words={
        **bart_lineage.WORDS,
        "layernorm_embedding": flag("embedding_norm", True, False),
        # As the published models; without this key the class norms after each addition.
        "encoder_normalize_before": {True: {}},
        "decoder_normalize_before": {True: {}},
        "share_decoder_input_output_embed": {
            True: {"token_embeddings": "separate", "output_projection": "tied"},
            False: {"token_embeddings": "separate", "output_projection": "linear"},
        },
    },
    fixed=ENCODER_DECODER,
    defaults={
        **dict.fromkeys(_WIDTHS, 512),
        **dict.fromkeys(_LENGTHS, 210),
        **bart_lineage.sizes(6, 8, 2048),
        "activation_function": "relu",
        "scale_embedding": True,
        **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before"), False),
        **dict.fromkeys(("layernorm_embedding", "share_decoder_input_output_embed"), False),
        "decoder_start_token_id": 2,
    },
    implied=m2m_100.position_offset,
)
