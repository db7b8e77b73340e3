"""Options of Marian in combinations that were published, by what is unusual in each."""

SSRU = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}
PUBLISHED = {
    "opus_mt": {},
    "tied_target": {"tied-embeddings-all": False, "tied-embeddings": True},
    "tied_source": {"tied-embeddings-all": False, "tied-embeddings-src": True},
    "tied_both": {
        "tied-embeddings-all": False,
        "tied-embeddings-src": True,
        "tied-embeddings": True,
    },
    "separate": {"tied-embeddings-all": False},
    "student": SSRU | {"transformer-ffn-activation": "relu"},
    "student_top": SSRU | {"transformer-postprocess-top": "n"},
    "deep_student": SSRU | {"enc-depth": 6, "dec-depth": 2, "transformer-dim-ffn": 24},
    "student_untied": SSRU | {"tied-embeddings-all": False, "tied-embeddings": True},
    "top": {"transformer-postprocess-top": "n"},
    "rms": {"transformer-postprocess": "dar", "transformer-postprocess-top": "r"},
    "no_dropout": {"transformer-postprocess": "an", "transformer-postprocess-emb": "n"},
    "late_dropout": {"transformer-postprocess": "and"},
    "embedding_norm": {"transformer-postprocess-emb": "nd"},
    "no_projection": {"transformer-no-projection": True},
    "no_positions": {"transformer-disable-position-embeddings": True},
    "no_bias": {"output-omit-bias": True},
    "narrow_decoder": {"transformer-decoder-dim-ffn": 6},
    "gelu": {"transformer-ffn-activation": "gelu"},
    "one_head": {"transformer-heads": 1},
    "deep_encoder": {"enc-depth": 3, "dec-depth": 1},
}
