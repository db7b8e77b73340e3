"""Small models of T5, mT5 and UMT5, and what none can be.

Texts of the tests are longer than `relative_attention_max_distance` and use every bucket. There are
as many layers in the encoder as in the decoder at least: `generate` of transformers 5.23 fails
otherwise.
"""

import types

import torch

from tests.convert.families.described import Case

REFUSED = {
    "is_encoder_decoder": False,
    "is_decoder": True,
    "feed_forward_proj": "gated-gelu_python",
    "d_kv": 5.0,
    "num_heads": 0,
    "num_layers": None,
    "num_decoder_layers": 2.0,
    "relative_attention_num_buckets": 3,
    "relative_attention_max_distance": 2,
    "layer_norm_epsilon": 0.0,
    "dropout_rate": "0.1",
    "pad_token_id": 53,
    "decoder_start_token_id": -1,
    "eos_token_id": [0, 1],
    "n_positions": 0,
}
IMPOSSIBLE = (
    {"norm": "layer_norm"},
    {"norm_placement": "post"},
    {"attention_scale": "head_dim"},
    {"embedding_scale": "sqrt_d_model"},
    {"qkv_bias": True},
    {"output_bias": True},
    {"token_embeddings": "separate", "output_projection": "linear"},
    {"activation_dropout": 0.3},
    {"final_dropout": False},
    {"gated_feed_forward": True, "activation": "gelu"},
)


SIZES = """vocab_size d_model d_kv num_heads d_ff num_layers relative_attention_num_buckets
    relative_attention_max_distance""".split()
# The heads are together narrower than the model; one head is wider than it; as wide as it.
THREE_HEADS = dict(zip(SIZES, (53, 42, 5, 3, 61, 2, 8, 6), strict=True))
ONE_HEAD = dict(zip(SIZES, (31, 14, 17, 1, 23, 3, 7, 9), strict=True))
SEVEN_HEADS = dict(zip(SIZES, (43, 35, 4, 7, 29, 2, 6, 5), strict=True)) | {
    "num_decoder_layers": 1,
    "pad_token_id": 41,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}


def finish(model, values):
    """Make a model comparable, and give it its own output matrix where its shape says so.

    Queries are as small as T5 draws them, which does not divide its scores: with large scores,
    float32 alone makes larger differences than the bounds. transformers 5 builds every model tied,
    and computes the norms of a float64 model in float32.
    """
    if values.get("tie_word_embeddings") is False:
        table = model.lm_head.weight
        generator = torch.Generator().manual_seed(1)
        numbers = torch.randn(table.shape, generator=generator) * table.shape[-1] ** -0.5
        model.lm_head.weight = torch.nn.Parameter(numbers.to(table.dtype))
    for name, leaf in model.named_parameters():
        if name.endswith("q.weight"):
            leaf.data *= values["d_kv"] ** -0.5
    if model.dtype == torch.float64:
        set_exact_norms(model)


def set_exact_norms(model):
    """Let the norms of T5 compute in the type of their input."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(_norm, module)


def _norm(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def finish_umt5(model, values):
    """Take away the factor of transformers 5 that models with their own output never had."""
    finish(model, values)
    if values.get("tie_word_embeddings") is False:
        model.model_dim = 1  # the factor is model_dim**-0.5


def case(shapes, *impossible, finish=finish):
    return Case(
        shapes=shapes,
        refused=REFUSED,
        impossible=(*IMPOSSIBLE, *impossible),
        finish=finish,
        float32=("wo.weight",),
    )


UNTIED = {"tie_word_embeddings": False}
FIRST_IS_PAD = {"decoder_start_token_id": 0}
RELU = {"feed_forward_proj": "relu"}
SCALED = {"output_scale": "inverse_sqrt_d_model"}
CASES = {
    "t5": case(
        {
            "tied": THREE_HEADS | FIRST_IS_PAD,
            "v1_1": ONE_HEAD | FIRST_IS_PAD | UNTIED | {"feed_forward_proj": "gated-gelu"},
            "tied_unscaled": SEVEN_HEADS
            | {"feed_forward_proj": "gated-silu", "scale_decoder_outputs": False}
            | {"layer_norm_epsilon": 1e-5},
        },
        {"relative_attention_bias": "per_layer"},
    ),
    "mt5": case(
        {"own_output": THREE_HEADS | UNTIED, "tied": ONE_HEAD, "relu": SEVEN_HEADS | RELU | UNTIED},
        {"relative_attention_bias": "per_layer"},
        SCALED,
    ),
    "umt5": case(
        {
            "tied": THREE_HEADS | {"num_layers": 3},
            "own_output": ONE_HEAD | UNTIED,
            "own_output_relu": SEVEN_HEADS | RELU | UNTIED,
        },
        {"relative_attention_bias": "shared"},
        SCALED | {"output_projection": "linear"},
        finish=finish_umt5,
    ),
}
