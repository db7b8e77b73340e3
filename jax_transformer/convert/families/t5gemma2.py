"""T5Gemma2ForConditionalGeneration: T5Gemma 2 (Zhang et al. 2025), the blocks of Gemma 3; text."""

from jax_transformer.convert.families import gemma_lineage
from jax_transformer.convert.table import Layout, Row

_SLIDING = "rope_parameters.sliding_attention"
LAYOUT = Layout(
    "t5gemma2",
    (
        Row("model.encoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("lm_head.out_proj.weight", "token_embedding/embedding"),
        *gemma_lineage.stack_rows(),
    ),
)


def full_name(name: str) -> str:
    """Return the name in a file of a tensor of the model in memory."""
    return name.replace("model.encoder.text_model.", "model.encoder.")


FAMILY = gemma_lineage.family(
    "t5gemma2",
    "T5Gemma2ForConditionalGeneration",
    ("encoder.text_config", "decoder"),
    LAYOUT,
    pattern=6,
    rope="rope_parameters.full_attention",
    shared={f"{_SLIDING}.rope_theta": "sliding_window_theta"},
    constants={
        "encoder.model_type": "t5gemma2_encoder",
        "encoder.text_config.model_type": "t5gemma2_text",
        "decoder.model_type": "t5gemma2_decoder",
        # Without an origin: the smallest that reads images, and no token that ends one.
        "encoder.vision_config": {
            "model_type": "siglip_vision_model",
            **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), 1),
            **dict.fromkeys(("num_attention_heads", "image_size", "patch_size"), 1),
        },
        "encoder.mm_tokens_per_image": 1,
        "encoder.eoi_token_index": -1,
    },
    fixed={
        "tie_word_embeddings": (True,),
        f"encoder.text_config.{_SLIDING}.rope_type": ("default",),
        f"decoder.{_SLIDING}.rope_type": ("default",),
    },
    full_name=full_name,
    # What reads images, and the embedding of the token that ends one.
    other_parts=("*.vision_tower.*", "*.multi_modal_projector.*", "*.eoi_embedding"),
)
