"""UMT5ForConditionalGeneration: mT5 with relative biases in every layer (Chung et al. 2023).

The published models have an output matrix of their own and were trained without T5's factor
d_model**-0.5 before it: here, only a tied projection may have it. transformers 5.0 to 5.23 multiply
by it in every UMT5, and 5.24 where `scale_decoder_outputs` or the absence of
`tie_word_embeddings: false` says so, which is also true of folders that 5.0 to 5.23 wrote.
"""

from jax_transformer.convert.families import t5_lineage

FAMILY = t5_lineage.family(
    "umt5",
    "UMT5ForConditionalGeneration",
    "umt5",
    defaults=t5_lineage.MULTILINGUAL,
    tokenizer="TokenizersBackend",
    implied=lambda fields: (
        {"output_scale": "none"} if fields["output_projection"] == "linear" else {}
    ),
    **t5_lineage.SCALED,
)
