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


SIZES = """vocab_size d_model encoder_attention_heads encoder_ffn_dim encoder_layers decoder_layers
    max_position_embeddings""".split()


def both_sides(sizes):
    """Return the arguments of a config of equal widths; `sizes` are in the order of SIZES."""
    named = dict(zip(SIZES, sizes, strict=True))
    return named | {
        "decoder_attention_heads": named["encoder_attention_heads"],
        "decoder_ffn_dim": named["encoder_ffn_dim"],
        "scale_embedding": True,
        "dropout": 0.1,
    }


def ids(pad, eos, start=None):
    """Return the special ids; without a start id, targets begin with padding."""
    return {
        "pad_token_id": pad,
        "decoder_start_token_id": pad if start is None else start,
        "eos_token_id": eos,
        "forced_eos_token_id": eos,
    }


def activated(name):
    return {"activation_function": name}


THREE_HEADS = both_sides((53, 42, 3, 61, 2, 3, 37))
ONE_HEAD_UNSCALED = (
    both_sides((31, 10, 1, 7, 3, 1, 19)) | {"scale_embedding": False} | activated("gelu")
)
SEVEN_HEADS = both_sides((43, 70, 7, 29, 1, 2, 23))


def usual_case(activation, other, impossible, refused=()):
    """Return the case of a family with learned positions; `other` activates the last shape."""
    return Case(
        shapes={
            "three_heads": THREE_HEADS | activated(activation),
            "one_head_unscaled": ONE_HEAD_UNSCALED | ids(pad=5, eos=11),
            "other_ids": SEVEN_HEADS
            | {"attention_dropout": 0.1}
            | activated(other)
            | ids(pad=41, eos=3, start=4),
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
            "three_heads": THREE_HEADS | activated("relu"),
            "one_head_unscaled": ONE_HEAD_UNSCALED | ids(pad=5, eos=11, start=4),
            # An odd width: the last column of the position table is zero.
            "other_ids": SEVEN_HEADS
            | {"d_model": 35}
            | activated("gelu")
            | ids(pad=9, eos=3, start=4),
        },
        # Padding has no position: it cannot begin targets.
        refused=REFUSED | {"decoder_start_token_id": 1},
        impossible=(
            *(change for change in IMPOSSIBLE if "output_bias" not in change),
            {"output_bias": True},
            {"norm_placement": "post"},
            {"final_norm": False},
            {"position_offset": 0},
            {"position_rounding": "float16"},
        ),
        tables={"embed_positions.weights": tensor2tensor_sinusoids},
    ),
    "marian": Case(
        shapes={
            "three_heads": THREE_HEADS | activated("swish") | ids(pad=52, eos=0),
            "one_head_unscaled": ONE_HEAD_UNSCALED | ids(pad=5, eos=11),
            "two_tables": SEVEN_HEADS
            | {"decoder_vocab_size": 47, "share_encoder_decoder_embeddings": False}
            | activated("relu")
            | ids(pad=41, eos=3),
        },
        refused=REFUSED
        | {"vocab_size": 54, "decoder_vocab_size": 54, "share_encoder_decoder_embeddings": 1},
        impossible=(*IMPOSSIBLE, {"norm_placement": "pre"}, {"final_norm": True}),
        tables={"embed_positions.weight": sinusoids},
    ),
    "pegasus": Case(
        shapes={
            "three_heads": THREE_HEADS | activated("relu") | RATES,
            "one_head_unscaled": ONE_HEAD_UNSCALED | RATES,
            "other_ids": SEVEN_HEADS | activated("swish") | ids(pad=41, eos=3, start=2) | RATES,
        },
        refused=REFUSED,
        impossible=(*IMPOSSIBLE, {"norm_placement": "post"}, {"final_norm": False}),
        tables={"embed_positions.weight": sinusoids},
    ),
}
