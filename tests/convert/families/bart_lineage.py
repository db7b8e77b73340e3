"""Small models of BART, Marian, Pegasus and the others of their lineage, and what none can be."""

import torch

from tests.convert.families.described import Case

REFUSED = {
    "is_encoder_decoder": False,
    "is_decoder": True,
    "tie_word_embeddings": False,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 60,
    "activation_function": "quick_gelu",
    "d_model": 43,
    "pad_token_id": 53,
    "eos_token_id": [0, 1],
    "decoder_start_token_id": None,
    "max_position_embeddings": 0,
    "scale_embedding": "false",
    "dropout": "0.1",
    "attention_dropout": None,
    "encoder_layers": 2.0,
}
IMPOSSIBLE = (
    {"positions": "sinusoidal", "position_offset": 0},
    {"norm_epsilon": 1e-6},
    {"qkv_bias": False},
    {"output_projection": "linear"},
    {"output_bias": False},
    {"token_embeddings": "none", "output_projection": "linear"},
    {"embedding_dropout": "decoder"},
    {"memory_norm": True},
)


def sinusoids(length, d_model):
    """Return the position table as transformers documents it: sines, then cosines."""
    frequency = 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def tensor2tensor_sinusoids(length, d_model):
    """Return the position table of M2M100 in float64; its row of padding is not used."""
    half = d_model // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / (half - 1))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, d_model % 2))


def both_sides(heads, d_ff, **others):
    """Return the arguments of a config whose encoder and decoder have the same widths."""
    return {
        "scale_embedding": True,
        "dropout": 0.1,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": d_ff,
        "decoder_ffn_dim": d_ff,
    } | others


def ids(pad, eos, start=None):
    """Return the special ids; without a start id, targets begin with padding."""
    return {
        "pad_token_id": pad,
        "decoder_start_token_id": pad if start is None else start,
        "eos_token_id": eos,
        "forced_eos_token_id": eos,
    }


def three_heads(**others):
    return both_sides(
        heads=3,
        d_ff=61,
        vocab_size=53,
        d_model=42,
        encoder_layers=2,
        decoder_layers=3,
        max_position_embeddings=37,
        **others,
    )


def one_head_unscaled(**others):
    return both_sides(
        heads=1,
        d_ff=7,
        vocab_size=31,
        d_model=10,
        encoder_layers=3,
        decoder_layers=1,
        max_position_embeddings=19,
        scale_embedding=False,
        activation_function="gelu",
        **others,
    )


def seven_heads(d_model=70, **others):
    return both_sides(
        heads=7,
        d_ff=29,
        vocab_size=43,
        d_model=d_model,
        encoder_layers=1,
        decoder_layers=2,
        max_position_embeddings=23,
        **others,
    )


def usual_case(activation, other, impossible, refused=()):
    """Return the case of a family with learned positions; `other` activates the last shape."""
    return Case(
        shapes={
            "three_heads": three_heads(activation_function=activation),
            "one_head_unscaled": one_head_unscaled(**ids(pad=5, eos=11)),
            "other_ids": seven_heads(
                activation_function=other, attention_dropout=0.1, **ids(pad=41, eos=3, start=4)
            ),
        },
        refused=REFUSED | dict(refused),
        impossible=(*IMPOSSIBLE, *({name: value} for name, value in impossible.items())),
    )


POST_NORM = {"norm_placement": "pre", "final_norm": True, "embedding_norm": False}
POST_NORM |= {"position_offset": 0}
RATES = {"attention_dropout": 0.1, "activation_dropout": 0.1}
# Without a start id, BOS is the first.
BEYOND_THE_VOCABULARY = {"decoder_start_token_id": 53}
CASES = {
    "bart": usual_case("gelu", "swish", POST_NORM),
    "mvp": usual_case("gelu", "swish", POST_NORM, refused={"use_prompt": True}),
    "plbart": usual_case("gelu", "swish", POST_NORM, refused=BEYOND_THE_VOCABULARY),
    "mbart": usual_case(
        "relu",
        "gelu",
        POST_NORM | {"norm_placement": "post", "final_norm": False},
        refused=BEYOND_THE_VOCABULARY,
    ),
    "blenderbot": usual_case(
        "gelu",
        "relu",
        {"norm_placement": "post", "final_norm": False, "embedding_norm": True}
        | {"position_offset": 2},
    ),
    "m2m_100": Case(
        shapes={
            "three_heads": three_heads(activation_function="relu"),
            "one_head_unscaled": one_head_unscaled(**ids(pad=5, eos=11, start=4)),
            # An odd width: the last column of the position table is zero.
            "other_ids": seven_heads(
                d_model=35, activation_function="gelu", **ids(pad=9, eos=3, start=4)
            ),
        },
        # Padding has no position: it cannot begin targets.
        refused=REFUSED | {"decoder_start_token_id": 1},
        impossible=(
            *(change for change in IMPOSSIBLE if "output_bias" not in change),
            {"output_bias": True},
            {"norm_placement": "post"},
            {"final_norm": False},
            {"position_offset": 0},
        ),
        tables={"embed_positions.weights": tensor2tensor_sinusoids},
    ),
    "marian": Case(
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
        | {"vocab_size": 54, "decoder_vocab_size": 54, "share_encoder_decoder_embeddings": 1},
        impossible=(*IMPOSSIBLE, {"norm_placement": "pre"}, {"final_norm": True}),
        tables={"embed_positions.weight": sinusoids},
    ),
    "pegasus": Case(
        shapes={
            "three_heads": three_heads(activation_function="relu", **RATES),
            "one_head_unscaled": one_head_unscaled(**RATES),
            "other_ids": seven_heads(
                activation_function="swish", **ids(pad=41, eos=3, start=2), **RATES
            ),
        },
        refused=REFUSED,
        impossible=(*IMPOSSIBLE, {"norm_placement": "post"}, {"final_norm": False}),
        tables={"embed_positions.weight": sinusoids},
    ),
}
