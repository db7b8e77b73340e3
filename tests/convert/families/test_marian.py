"""MarianMTModel beside this library's: the same numbers, and weights that travel both ways.

No model is downloaded: each is built from a MarianConfig with random numbers in every leaf.
"""

import dataclasses
import itertools
import json
import os
import random
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

from jax_transformer import TransformerConfig, apply, encode
from jax_transformer.convert import files
from jax_transformer.convert.families import marian
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.errors import InputError
from jax_transformer.layers import EncoderLayer
from jax_transformer.masks import source_mask
from tests.parity.ladder import bound, error

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

COMMON = {"scale_embedding": True, "activation_function": "swish", "dropout": 0.1}
SHAPES = {
    "three_heads": {
        "vocab_size": 53,
        "d_model": 42,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 61,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "max_position_embeddings": 37,
        "pad_token_id": 52,
        "eos_token_id": 0,
    },
    "one_head_unscaled": {
        "vocab_size": 31,
        "d_model": 10,
        "encoder_attention_heads": 1,
        "encoder_ffn_dim": 7,
        "encoder_layers": 3,
        "decoder_layers": 1,
        "max_position_embeddings": 19,
        "pad_token_id": 5,
        "eos_token_id": 11,
        "scale_embedding": False,
        "activation_function": "gelu",
    },
    "two_tables": {
        "vocab_size": 43,
        "decoder_vocab_size": 47,
        "d_model": 70,
        "encoder_attention_heads": 7,
        "encoder_ffn_dim": 29,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "max_position_embeddings": 23,
        "pad_token_id": 41,
        "eos_token_id": 3,
        "activation_function": "relu",
        "share_encoder_decoder_embeddings": False,
    },
}
OPUS_MT = {
    "vocab_size": 58_101,
    "d_model": 512,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "max_position_embeddings": 512,
    "pad_token_id": 58_100,
    "eos_token_id": 0,
}


def marian_model(shape, dtype=torch.float32, **changes):
    """Return a MarianMTModel whose every leaf is random, the biases and the norms too."""
    values = COMMON | shape | changes
    values |= {
        "decoder_attention_heads": values["encoder_attention_heads"],
        "decoder_ffn_dim": values["encoder_ffn_dim"],
        "decoder_start_token_id": values["pad_token_id"],
        "forced_eos_token_id": values["eos_token_id"],
    }
    model = transformers.MarianMTModel(transformers.MarianConfig(**values)).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    for name, leaf in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("embed_positions.weight"):
            # transformers rounds its sinusoids to float32, whatever the type of the model.
            leaf.data = sinusoids(*leaf.shape).to(dtype)
        else:
            deviation = leaf.shape[-1] ** -0.5 if name.endswith("weight") and leaf.ndim > 1 else 0.3
            leaf.data.normal_(1.0 if "norm.weight" in name else 0.0, deviation, generator=generator)
    return model


def sinusoids(length, d_model):
    """Return the position table as transformers documents it: sines, then cosines."""
    frequency = 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def ragged_tokens(config, source_length=13, target_length=11):
    """Return sources padded on the right to different lengths, and targets from the start id."""
    chance = np.random.default_rng(0)
    batch = 3
    src = chance.integers(6, config.src_vocab_size - 3, (batch, source_length)).astype(np.int32)
    tgt = chance.integers(6, config.tgt_vocab_size - 3, (batch, target_length)).astype(np.int32)
    for ids in (src, tgt):
        ids[ids == config.pad_id] = config.eos_id
    for row, length in enumerate((source_length, 5, 1)):
        src[row, length - 1 :] = config.pad_id
        src[row, length - 1] = config.eos_id
    tgt[:, 0] = config.bos_id
    return src, tgt


def foreign_results(model, config, src, tgt):
    """Return logits and encoder states (embedded, then after each layer) of transformers."""
    with torch.no_grad():
        result = model(
            input_ids=torch.tensor(src, dtype=torch.int64),
            attention_mask=torch.tensor(src != config.pad_id).long(),
            decoder_input_ids=torch.tensor(tgt, dtype=torch.int64),
            output_hidden_states=True,
        )
    return result.logits, result.encoder_hidden_states


# Compiled whole: thousands of small compilations would take longer.
forward = jax.jit(apply, static_argnames="config")
memory = jax.jit(encode, static_argnames="config")
layer = jax.jit(
    lambda config, params, x, mask: EncoderLayer(config).apply({"params": params}, x, mask),
    static_argnames="config",
)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_numbers(shape, dtype):
    model = marian_model(SHAPES[shape], getattr(torch, dtype))
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config)
    logits, states = foreign_results(model, config, src, tgt)
    measured = error(forward(params, config, src, tgt), logits)
    print(f"\n{shape} {dtype}: logits {measured:.1e}", end="")
    assert measured <= bound("logits", dtype)

    valid = src != config.pad_id  # what stands at padding is anybody's
    mask = source_mask(jnp.asarray(src), config)
    for index, (before, after) in enumerate(itertools.pairwise(states)):
        own = layer(config, params["encoder"][f"layers_{index}"], before.numpy(), mask)
        measured = error(np.asarray(own)[valid], after.numpy()[valid])
        print(f", encoder layer {index} {measured:.1e}", end="")
        assert measured <= bound("block", dtype)
    measured = error(np.asarray(memory(params, config, src))[valid], states[-1].numpy()[valid])
    print(f", memory {measured:.1e}")
    assert measured <= bound("logits", dtype)


def test_the_numbers_of_opus_mt(dtype):
    model = marian_model(OPUS_MT, getattr(torch, dtype))
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config, 7, 5)
    logits, _ = foreign_results(model, config, src, tgt)
    measured = error(forward(params, config, src, tgt), logits)
    print(f"\nopus-mt {dtype}: logits {measured:.1e} of the largest, {logits.abs().max():.1f}")
    assert measured <= bound("logits", dtype)


@pytest.mark.parametrize("leaf", ["final_logits_bias", "scale", "positions", "activation", "swap"])
def test_the_comparison_sees_each_peculiarity(leaf):
    """Without one of Marian's peculiarities the logits are far off: the bounds are no formality."""
    model = marian_model(SHAPES["three_heads"])
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config)
    logits, _ = foreign_results(model, config, src, tgt)
    changes = {
        "scale": {"embedding_scale": "none"},
        "positions": {"positions": "sinusoidal"},
        "activation": {"activation": "gelu"},
    }
    config = dataclasses.replace(config, **changes.get(leaf, {}))
    if leaf == "final_logits_bias":
        params["output_projection"]["bias"] *= 0
    if leaf == "swap":
        attention = params["decoder"]["layers_0"]["cross_attention"]
        attention["query"], attention["key"] = attention["key"], attention["query"]
    assert error(forward(params, config, src, tgt), logits) > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype_name", ["float32", "float16", "bfloat16"])
def test_there_and_back_is_bit_equal(tmp_path, shape, dtype_name):
    model = marian_model(SHAPES[shape], getattr(torch, dtype_name))
    config, params = from_huggingface(model)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype_name}
    to_huggingface(params, config, tmp_path / "model")
    assert sorted(os.listdir(tmp_path / "model")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    loaded, report = transformers.MarianMTModel.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    assert str(loaded.dtype) == f"torch.{dtype_name}"
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    assert {tensor.dtype for tensor in found.values()} == {loaded.dtype}
    equal = [name for name in expected if same_bits(expected[name], found[name])]
    # transformers computes the two tables of positions anew.
    print(f"\n{shape} {dtype_name}: {len(equal)} of {len(expected)} tensors bit-equal")
    assert {name for name in expected if "embed_positions" not in name} <= set(equal)
    tied = [loaded.lm_head.weight, loaded.model.decoder.embed_tokens.weight]
    assert tied[0] is tied[1]

    own_config, own_params = from_huggingface(tmp_path / "model")
    assert own_config == config
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(own_params), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def same_bits(one, other):
    one, other = (tensor.contiguous().view(torch.uint8).numpy() for tensor in (one, other))
    return np.array_equal(one, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_transformers_saves_is_read(tmp_path, shape):
    model = marian_model(SHAPES[shape])
    model.save_pretrained(tmp_path / "new")
    model.config.save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    config, params = from_huggingface(model)
    to_huggingface(params, config, tmp_path / "own")  # under the same names: no tied copies
    own, theirs = (files.read(tmp_path / name / "model.safetensors") for name in ("own", "new"))
    assert own.keys() == theirs.keys()
    for folder in ("new", "old"):
        read_config, read_params = from_huggingface(tmp_path / folder)
        assert read_config == config
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read_params, params))


def test_config_of_an_older_transformers_is_read():
    """The keys that config.json of opus-mt models had in 2020, before some of today's."""
    values = transformers.MarianConfig(**COMMON | OPUS_MT).to_dict()
    for key in ("decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings"):
        del values[key]
    values |= {
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "normalize_before": False,
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "num_beams": 6,
        "max_length": 512,
        "bad_words_ids": [[58_100]],
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "pad_token_id": 58_100,
        "decoder_start_token_id": 58_100,
    }
    assert marian.config_from_json(values) == TransformerConfig.preset("marian")


REFUSED = {
    "model_type": "bart",
    "is_encoder_decoder": False,
    "is_decoder": True,
    "tie_word_embeddings": False,
    "static_position_embeddings": False,
    "normalize_before": True,
    "normalize_embedding": True,
    "add_final_layer_norm": True,
    "encoder_layerdrop": 0.1,
    "decoder_layerdrop": 0.1,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 60,
    "activation_function": "quick_gelu",
    "d_model": 43,
    "vocab_size": 54,
    "decoder_vocab_size": 54,
    "pad_token_id": 53,
    "eos_token_id": [0, 1],
    "decoder_start_token_id": None,
    "max_position_embeddings": 0,
    "scale_embedding": "false",
    "share_encoder_decoder_embeddings": 1,
    "dropout": "0.1",
    "attention_dropout": None,
    "encoder_layers": 2.0,
}
OWN_NAMES = {  # what the message calls a key whose value TransformerConfig refuses
    "vocab_size": "src_vocab_size",
    "decoder_vocab_size": "tgt_vocab_size",
    "pad_token_id": "pad_id",
    "max_position_embeddings": "max_length",
}


@pytest.mark.parametrize("key", REFUSED)
def test_values_that_cannot_be_honoured_are_refused_by_name(tmp_path, key):
    config, params = from_huggingface(marian_model(SHAPES["three_heads"]))
    to_huggingface(params, config, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: REFUSED[key]}))
    with pytest.raises(InputError, match=rf"config\.json: .*{OWN_NAMES.get(key, key)}"):
        from_huggingface(tmp_path / "model")


@pytest.mark.parametrize("key", ["d_model", "pad_token_id", "scale_embedding", "vocab_size"])
def test_missing_keys_are_refused_by_name(key):
    values = marian_model(SHAPES["three_heads"]).config.to_dict()
    del values[key]
    with pytest.raises(InputError, match=f"config.json has no '{key}'"):
        marian.config_from_json(values)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "sinusoidal"},
        {"norm_placement": "pre"},
        {"final_norm": True},
        {"norm_epsilon": 1e-6},
        {"qkv_bias": False},
        {"output_projection": "linear"},
        {"output_bias": False},
        {"token_embeddings": "none", "output_projection": "linear"},
        {"embedding_dropout": "decoder"},
        {"memory_norm": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_configs_that_marian_cannot_have_are_refused_by_name(tmp_path, changes):
    config, params = from_huggingface(marian_model(SHAPES["three_heads"]))
    config = dataclasses.replace(config, **changes)
    with pytest.raises(
        InputError, match=f"no MarianMTModel has this config: {next(iter(changes))}"
    ):
        to_huggingface(params, config, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_every_activation_goes_there_and_back():
    config, _ = from_huggingface(marian_model(SHAPES["three_heads"]))
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        changed = dataclasses.replace(config, activation=activation, attention_dropout=None)
        back = marian.config_from_json(marian.config_to_json(changed))
        assert back == dataclasses.replace(changed, attention_dropout=changed.dropout)


def test_nothing_is_overwritten(tmp_path):
    config, params = from_huggingface(marian_model(SHAPES["three_heads"]))
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("precious")
        (folder / "source.spm").write_text("a tokenizer")
        with pytest.raises(InputError, match=f"already holds {name}"):
            to_huggingface(params, config, folder)
        assert (folder / name).read_text() == "precious"
        assert sorted(os.listdir(folder)) == sorted([name, "source.spm"])
        to_huggingface(params, config, folder, overwrite=True)
        assert from_huggingface(folder)[0] == config
        assert (folder / "source.spm").read_text() == "a tokenizer"


def test_links_in_the_folder_are_replaced_not_followed(tmp_path):
    config, params = from_huggingface(marian_model(SHAPES["three_heads"]))
    folder, target = tmp_path / "model", tmp_path / "target"
    folder.mkdir()
    target.write_text("precious")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(target)
    to_huggingface(params, config, folder, overwrite=True)
    assert target.read_text() == "precious"
    assert not any((folder / name).is_symlink() for name in os.listdir(folder))


def test_unusable_sources_are_refused(tmp_path):
    config, params = from_huggingface(marian_model(SHAPES["three_heads"]))
    with pytest.raises(InputError, match="opus-mt-en-de is no folder; nothing is downloaded"):
        from_huggingface("Helsinki-NLP/opus-mt-en-de")
    with pytest.raises(InputError, match=r"config\.json is no readable JSON.*No such file"):
        from_huggingface(tmp_path)
    with pytest.raises(InputError, match=r"cannot be written.*No such file"):
        to_huggingface(params, config, tmp_path / "missing" / "model")
    to_huggingface(params, config, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        from_huggingface(tmp_path / "model")


def test_another_models_weights_are_refused_with_every_fault(tmp_path):
    for name in ("three_heads", "two_tables"):
        config, params = from_huggingface(marian_model(SHAPES[name]))
        to_huggingface(params, config, tmp_path / name)
    source = tmp_path / "two_tables" / "model.safetensors"
    tensors = files.read(tmp_path / "three_heads" / "model.safetensors")
    tensors["model.encoder.layers.0.fc1.bias"] = np.ones(60, np.float32)
    tensors["model.decoder.layers.1.fc2.bias"][3] = np.nan
    del tensors["model.decoder.layers.0.encoder_attn.k_proj.bias"]
    files.write(tmp_path / "three_heads" / "model.safetensors", tensors, overwrite=True)
    with pytest.raises(InputError) as refused:
        from_huggingface(tmp_path / "three_heads")
    for fault in (
        r"model.encoder.layers.0.fc1.bias  [60], expected [61]",
        r"model.decoder.layers.1.fc2.bias  nan at [3]",
        r"missing         model.decoder.layers.0.encoder_attn.k_proj.bias",
    ):
        assert fault in str(refused.value)
    os.replace(source, tmp_path / "three_heads" / "model.safetensors")
    with pytest.raises(InputError):
        from_huggingface(tmp_path / "three_heads")


@pytest.mark.parametrize(
    ("leaf", "tied"),
    [("model.decoder.embed_tokens.weight", True), ("model.encoder.embed_positions.weight", False)],
)
def test_an_untied_copy_or_other_positions_are_refused(tmp_path, leaf, tied):
    model = marian_model(SHAPES["three_heads"])
    model.config.save_pretrained(tmp_path)
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    from_huggingface(tmp_path)  # equal copies are fine
    state_dict[leaf][4, 3] += 0.01
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=f"{'not tied' if tied else 'not as computed'} .*{leaf}"):
        from_huggingface(tmp_path)


@pytest.mark.parametrize("source", ["float64", "int32", "complex64"])
def test_no_type_is_changed_unasked(source):
    """float64 would become float32 in jax unasked; numbers of other kinds are no weights."""
    model = marian_model(SHAPES["three_heads"])
    tensors = {name: tensor.numpy().astype(source) for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=r"float64 tensors need|wrong dtype"):
        from_huggingface(Model(model.config, tensors))


class Model:
    """What `from_huggingface` uses of a model, with any tensors."""

    def __init__(self, config, tensors):
        self.config, self.tensors = config, tensors

    def state_dict(self):
        return self.tensors


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float64"])
def test_types_are_changed_on_request(source):
    model = marian_model(SHAPES["three_heads"], getattr(torch, source))
    _, params = from_huggingface(model, dtype="float32")
    expected = model.state_dict()["model.encoder.layers.0.fc1.weight"].T.float().numpy()
    kernel = params["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert np.array_equal(kernel, expected)


def test_claims_beyond_the_weights_are_refused_at_once(tmp_path):
    model = marian_model(SHAPES["three_heads"])
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for key, claim in {
        "encoder_layers": 10**9,
        "decoder_layers": 10**9,
        "d_model": 3 * 10**12,
        "encoder_ffn_dim": 10**15,
        "vocab_size": 10**12,
        "max_position_embeddings": 10**12,
    }.items():
        claimed = values | {key: claim, key.replace("encoder", "decoder"): claim}
        if key == "vocab_size":
            claimed["decoder_vocab_size"] = claim
        path.write_text(json.dumps(claimed))
        with pytest.raises(InputError, match=f"config.json: .*{key}.*weights allow at most"):
            from_huggingface(tmp_path)


def test_mutated_configs_raise_nothing_else(tmp_path):
    config, params = from_huggingface(marian_model(SHAPES["one_head_unscaled"]))
    to_huggingface(params, config, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    whole = path.read_bytes()
    chance = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 5])):
            at = chance.randrange(len(data))
            if chance.random() < 0.7:
                data[at] = chance.choice(b'0123456789-.eE"{}[],:ntfu\x00\xff')
            else:
                del data[at : at + chance.randrange(1, 30)]
        path.write_bytes(data)
        try:
            from_huggingface(tmp_path / "model")
        except InputError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    print(f"\n400 mutated config.json: {outcomes}")
    assert outcomes["refused"] > 100


def test_all_works_offline(tmp_path, monkeypatch):
    connections = []

    def refuse(*arguments):
        connections.append(arguments)
        raise OSError("the network is off")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    config, params = from_huggingface(marian_model(SHAPES["three_heads"]))
    to_huggingface(params, config, tmp_path / "model")
    from_huggingface(tmp_path / "model")
    transformers.MarianMTModel.from_pretrained(tmp_path / "model")
    print(f"\n{len(connections)} connections tried")
    assert not connections


def test_translation_goes_on_in_transformers(tmp_path):
    """What is exported generates as the model it came from did: start, end and forbidden ids."""
    model = marian_model(SHAPES["three_heads"])
    config, params = from_huggingface(model)
    to_huggingface(params, config, tmp_path / "model")
    loaded = transformers.MarianMTModel.from_pretrained(tmp_path / "model")
    assert loaded.generation_config.bad_words_ids == [[config.pad_id]]
    src, _ = ragged_tokens(config)
    source = {
        "input_ids": torch.tensor(src, dtype=torch.int64),
        "attention_mask": torch.tensor(src != config.pad_id).long(),
    }
    expected = model.generate(**source, bad_words_ids=[[config.pad_id]], max_length=17)
    assert torch.equal(loaded.generate(**source, max_length=17), expected)
    assert safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors").keys() >= {
        "model.shared.weight",
        "final_logits_bias",
    }
