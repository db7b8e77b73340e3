"""Small models of T5, mT5 and UMT5, and what none can be.

Texts of the tests are longer than `relative_attention_max_distance` and use every bucket. There are
as many layers in the encoder as in the decoder at least: `generate` of transformers 5.23 fails
otherwise.
"""

import json
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


def three_heads(**others):
    """Return a shape whose heads are together narrower than the model."""
    return {
        "vocab_size": 53,
        "d_model": 42,
        "d_kv": 5,
        "num_heads": 3,
        "d_ff": 61,
        "num_layers": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6,
    } | others


def one_head(**others):
    """Return a shape whose head is wider than the model."""
    return {
        "vocab_size": 31,
        "d_model": 14,
        "d_kv": 17,
        "num_heads": 1,
        "d_ff": 23,
        "num_layers": 3,
        "relative_attention_num_buckets": 7,
        "relative_attention_max_distance": 9,
    } | others


def seven_heads(**others):
    return {
        "vocab_size": 43,
        "d_model": 35,
        "d_kv": 4,
        "num_heads": 7,
        "d_ff": 29,
        "num_layers": 2,
        "num_decoder_layers": 1,
        "relative_attention_num_buckets": 6,
        "relative_attention_max_distance": 5,
        "pad_token_id": 41,
        "eos_token_id": 3,
        "decoder_start_token_id": 2,
    } | others


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
CASES = {
    "t5": case(
        {
            "tied": three_heads(decoder_start_token_id=0),
            "v1_1": one_head(decoder_start_token_id=0, feed_forward_proj="gated-gelu", **UNTIED),
            "tied_unscaled": seven_heads(
                feed_forward_proj="gated-silu", scale_decoder_outputs=False, layer_norm_epsilon=1e-5
            ),
        },
        {"relative_attention_bias": "per_layer"},
    ),
    "mt5": case(
        {
            "own_output": three_heads(**UNTIED),
            "tied": one_head(),
            "relu": seven_heads(feed_forward_proj="relu", **UNTIED),
        },
        {"relative_attention_bias": "per_layer"},
        {"output_scale": "inverse_sqrt_d_model"},
    ),
    "umt5": case(
        {
            "tied": three_heads(num_layers=3),
            "own_output": one_head(**UNTIED),
            "own_output_relu": seven_heads(feed_forward_proj="relu", **UNTIED),
        },
        {"relative_attention_bias": "shared"},
        {"output_scale": "inverse_sqrt_d_model", "output_projection": "linear"},
        finish=finish_umt5,
    ),
}


def write_folder(folder, model, **keys):
    """Write what transformers saves, with other keys of config.json; "absent" removes a key."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | keys
    values = {key: value for key, value in values.items() if value != "absent"}
    path.write_text(json.dumps(values))
    return folder
