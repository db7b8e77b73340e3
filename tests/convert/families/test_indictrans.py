"""IndicTrans2: its class is not in transformers, but all parts of it are."""

import json

import pytest
import torch

from jax_transformer import TransformerConfig
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_from_json, config_to_json
from jax_transformer.convert.huggingface import load_tokenizer
from jax_transformer.errors import InputError
from tests.convert.families.bart_lineage import tensor2tensor_sinusoids
from tests.convert.families.case import goes_home, logits_error, transformers
from tests.parity.ladder import bound

FAMILY = FAMILIES["IndicTrans"]
# All keys of its class with the values of a large model, and some that are not read.
LARGE = json.loads("""{"activation_dropout": 0.0, "activation_function": "gelu",
"architectures": ["IndicTransForConditionalGeneration"], "attention_dropout": 0.0,
"bos_token_id": 0,
"auto_map": {"AutoModelForSeq2SeqLM": "modeling_indictrans.IndicTransForConditionalGeneration"},
"decoder_attention_heads": 16, "decoder_embed_dim": 1024, "decoder_ffn_dim": 8192,
"decoder_layerdrop": 0, "decoder_layers": 18, "decoder_normalize_before": true,
"decoder_start_token_id": 2, "decoder_vocab_size": 122672, "dropout": 0.2,
"encoder_attention_heads": 16, "encoder_embed_dim": 1024, "encoder_ffn_dim": 8192,
"encoder_layerdrop": 0, "encoder_layers": 18, "encoder_normalize_before": true,
"encoder_vocab_size": 32322, "eos_token_id": 2, "init_std": 0.02, "is_encoder_decoder": true,
"layernorm_embedding": true, "max_source_positions": 256, "max_target_positions": 256,
"model_type": "IndicTrans", "num_hidden_layers": 18, "pad_token_id": 1, "scale_embedding": true,
"share_decoder_input_output_embed": false, "tokenizer_class": "IndicTransTokenizer",
"torch_dtype": "float32", "use_cache": true}""")
SIZES = {"d_model": 42, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 37}
SIZES |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 3)
SIZES |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 61)
SOURCES, TARGETS = 53, 47


class Positions(torch.nn.Module):
    """The positions of M2M100 for texts that are padded on the right."""

    def forward(self, ids, *lengths, **others):
        return tensor2tensor_sinusoids(ids.shape[1] + 2, SIZES["d_model"])[2:].to(self.dtype)


def write(folder, shared, normed=True, dtype=torch.float32):
    """Write a random IndicTrans; return mBART, whose layers it has, with its other parts."""
    norms = {"scale_embedding": True, "activation_function": "gelu"}
    config = transformers.MBartConfig(vocab_size=SOURCES, **SIZES, **norms)
    model = transformers.MBartForConditionalGeneration(config)
    table = transformers.models.mbart.modeling_mbart.MBartScaledWordEmbedding
    for stack, size in ((model.model.encoder, SOURCES), (model.model.decoder, TARGETS)):
        stack.embed_tokens = table(size, config.d_model, 1, embed_scale=config.d_model**0.5)
        stack.embed_positions = Positions()
        stack.embed_positions.dtype = dtype
        if not normed:
            stack.layernorm_embedding = torch.nn.Identity()
    model.lm_head = torch.nn.Linear(config.d_model, TARGETS, bias=False)
    if shared:
        model.lm_head.weight = model.model.decoder.embed_tokens.weight
    model.final_logits_bias = torch.zeros(1, TARGETS)
    generator = torch.Generator().manual_seed(0)
    for name, leaf in model.named_parameters():
        deviation = leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 0.3
        leaf.data.normal_(float("norm.weight" in name), deviation, generator=generator)
    model = model.to(dtype).eval()
    tensors = model.state_dict()
    for name in ("model.shared.weight", "final_logits_bias"):
        tensors.pop(name, None)
    values = LARGE | {key: SIZES[key] for key in SIZES.keys() & LARGE.keys()}
    values |= {"encoder_vocab_size": SOURCES, "decoder_vocab_size": TARGETS}
    values |= dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), SIZES["d_model"])
    values |= dict.fromkeys(("max_source_positions", "max_target_positions"), 37)
    values |= {"share_decoder_input_output_embed": shared, "layernorm_embedding": normed}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "modeling_indictrans.py").write_text("# remote code")
    torch.save(dict(tensors), folder / "pytorch_model.bin")
    return model


@pytest.mark.parametrize(("shared", "normed"), [(False, True), (True, True), (True, False)])
def test_the_numbers_are_those_of_its_parts_and_the_weights_go_home(shared, normed, tmp_path):
    model = write(tmp_path / "model", shared, normed)
    config, params = goes_home(tmp_path / "model", tmp_path / "home")
    measured = logits_error(params, config, model)
    print(f"\nIndicTrans shared={shared} normed={normed}: {measured:.1e}")
    assert measured <= bound("logits", "float32")
    assert (tmp_path / "home" / "modeling_indictrans.py").read_text() == "# remote code"


def test_the_config_of_a_large_model_is_read():
    config = config_from_json(FAMILY, LARGE)
    expected = TransformerConfig.preset(
        "m2m100",
        src_vocab_size=32_322,
        tgt_vocab_size=122_672,
        num_encoder_layers=18,
        num_decoder_layers=18,
        d_ff=8192,
        max_length=256,
        token_embeddings="separate",
        output_projection="linear",
        embedding_norm=True,
        activation="gelu",
        dropout=0.2,
        attention_dropout=0.0,
    )
    assert config == expected
    values = config_to_json(FAMILY, config)
    assert config_from_json(FAMILY, values) == config
    came = LARGE | {"is_decoder": False}
    assert values == {key: came[key] for key in values}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("encoder_normalize_before", False),
        ("decoder_normalize_before", None),
        ("decoder_embed_dim", 512),
        ("decoder_start_token_id", 1),
        ("encoder_vocab_size", None),
    ],
)
def test_what_it_cannot_be_is_refused_by_its_key(key, value):
    values = LARGE | {key: value}
    with pytest.raises(InputError, match=rf"config\.json: .*{key}"):
        config_from_json(FAMILY, values)
    if value is None:  # an absent key: post-norm, or no size at all
        del values[key]
        with pytest.raises(InputError, match=key):
            config_from_json(FAMILY, values)


def test_its_tokenizer_is_refused(tmp_path):
    write(tmp_path / "model", True)
    message = "cannot read the tokenizer of a IndicTransForConditionalGeneration; convert.from"
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path / "model")
