"""T5GemmaForConditionalGeneration: T5Gemma (Zhang et al. 2025), the blocks of Gemma 2."""

from jax_transformer.convert.families import gemma_lineage
from jax_transformer.convert.families.family import flag
from jax_transformer.convert.table import Layout, Row, transpose
from jax_transformer.model.tree import STACKS

_HEAD, _TABLE = "lm_head.out_proj.weight", "target_embedding/embedding"
LAYOUT = Layout(
    "t5gemma",
    (
        Row("model.encoder.embed_tokens.weight", "source_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", _TABLE),
        Row(_HEAD, _TABLE, when=("output_projection", "tied")),
        Row(_HEAD, "output_projection/kernel", transpose),
        *gemma_lineage.stack_rows(),
    ),
)
FAMILY = gemma_lineage.family(
    "t5gemma",
    "T5GemmaForConditionalGeneration",
    STACKS,
    LAYOUT,
    pattern=2,
    rope="rope_parameters",
    shared={"attn_logit_softcapping": "attention_softcap"},
    constants={f"{stack}.model_type": "t5_gemma_module" for stack in STACKS},
    words={"tie_word_embeddings": flag("output_projection", "tied", "linear")},
)
