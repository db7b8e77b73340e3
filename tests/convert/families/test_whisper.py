"""Whisper beside transformers: configs, weights, logits, gradients, cached steps, and the way home.

transformers casts nothing to float32 in this class, so nothing of it is patched: the logits are
compared in float64 as they are.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import torch

import jax_transformer
import torch_reference
from jax_transformer import apply, decode, encode, generate
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_from_json, config_to_json, notes
from jax_transformer.convert.families.whisper import padding_beside
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.transfer import to_params, to_tensors
from jax_transformer.errors import InputError
from tests.convert.families.case import (
    goes_home,
    read_values,
    strictly_loaded,
    weights_of,
)
from tests.convert.tools import assert_same_params
from tests.models import unchecked
from tests.parity.ladder import error
from tests.tiers import tiered

transformers = pytest.importorskip("transformers")

FAMILY = FAMILIES["whisper"]
SMALL = {
    **{"vocab_size": 97, "num_mel_bins": 10, "d_model": 24, "max_source_positions": 15},
    **{"max_target_positions": 19, "encoder_layers": 2, "decoder_layers": 3},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "decoder_start_token_id": 51},
    **{"pad_token_id": 50, "eos_token_id": 50, "bos_token_id": 50},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},
}
# Layers, width, heads and bands of the published sizes; the vocabularies are those of the files.
PUBLISHED = {
    "tiny": (51_865, 4, 4, 384, 6, 80),
    "tiny.en": (51_864, 4, 4, 384, 6, 80),
    "base": (51_865, 6, 6, 512, 8, 80),
    "small": (51_865, 12, 12, 768, 12, 80),
    "medium": (51_865, 24, 24, 1024, 16, 80),
    "large-v2": (51_865, 32, 32, 1280, 20, 80),
    "large-v3": (51_866, 32, 32, 1280, 20, 128),
    "large-v3-turbo": (51_866, 32, 4, 1280, 20, 128),
    "distil-large-v3": (51_866, 32, 2, 1280, 20, 128),
    "distil-small.en": (51_864, 12, 4, 768, 12, 80),
}


def published(name, **changes):
    """Return the config of transformers for a published size."""
    vocabulary, encoder, decoder, width, heads, bands = PUBLISHED[name]
    end = 50_256 if name.endswith(".en") else 50_257
    return transformers.WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=bands,
        d_model=width,
        encoder_layers=encoder,
        decoder_layers=decoder,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
        **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), end),
        **{"decoder_start_token_id": end + 1} | changes,
    )


def foreign_model(dtype=torch.float64, seed=0, **changes):
    """Return a model of transformers whose every leaf is random, but for its sinusoids."""
    config = transformers.WhisperConfig(**SMALL | changes)
    model = transformers.WhisperForConditionalGeneration(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, leaf in model.named_parameters():
        if not name.endswith("encoder.embed_positions.weight"):
            is_norm = name.endswith("norm.weight")
            deviation = leaf[0].numel() ** -0.5 if leaf.ndim > 1 else 0.3
            leaf.data.normal_(float(is_norm), deviation, generator=generator)
    return model


def batch(model, rows=3, length=11, seed=0):
    """Return features [rows, frames, bands] and targets that begin with the start token."""
    random, config = np.random.default_rng(seed), model.config
    frames = 2 * config.max_source_positions
    src = random.normal(size=(rows, frames, config.num_mel_bins))
    tgt = random.integers(1, config.vocab_size, (rows, length)).astype(np.int32)
    tgt[tgt == config.pad_token_id] = 1  # torch.nn.Embedding gives its row no gradient
    tgt[:, 0] = config.decoder_start_token_id
    return src, tgt


def as_features(src):
    return torch.from_numpy(np.ascontiguousarray(np.swapaxes(src, 1, 2)))


def foreign_logits(model, src, tgt):
    return model(as_features(src), decoder_input_ids=torch.from_numpy(tgt).long()).logits


def read_in_float64(model, **options):
    with jax.enable_x64(True):
        return from_huggingface(model, **options)


forward = jax.jit(apply, static_argnames="config")


@pytest.mark.parametrize(
    "changes",
    tiered(
        [
            {},
            {"num_mel_bins": 13, "decoder_layers": 1, "activation_function": "gelu_new"},
            {
                "d_model": 20,
                "max_source_positions": 8,
                "decoder_ffn_dim": 29,
                "encoder_ffn_dim": 29,
            },
            {"scale_embedding": True},
        ],
        [{}],
    ),
)
def test_logits_and_gradients_in_float64(changes):
    model = foreign_model(**changes)
    config, params = read_in_float64(model)
    src, tgt = batch(model)
    random = np.random.default_rng(3).normal(size=(*tgt.shape, config.tgt_vocab_size))
    with jax.enable_x64(True), unchecked():
        assert error(forward(params, config, src, tgt), foreign_logits(model, src, tgt)) <= 1e-12

        def total(params):
            return (apply(params, config, src, tgt) * random).sum()

        gradients = jax.tree.map(np.asarray, jax.jit(jax.grad(total))(params))
    (foreign_logits(model, src, tgt) * torch.from_numpy(random)).sum().backward()
    foreign = {name: leaf.grad for name, leaf in model.named_parameters()}
    # The class trains no position of the encoder: `--freeze "source_positions/*"`.
    assert foreign.pop("model.encoder.embed_positions.weight") is None
    ours, _ = to_tensors(gradients, config, FAMILY.layout)
    for name, expected in foreign.items():
        assert error(ours[name], expected) <= 1e-12, name


def test_cached_steps_search_as_transformers_does():
    model = foreign_model(torch.float32, seed=4)
    config, params = from_huggingface(model)
    src = batch(model, rows=5)[0].astype(np.float32)
    for beam_size in (1, 3):
        with torch.no_grad():
            theirs = transformers.generation.GenerationMixin.generate(
                model,
                as_features(src),
                decoder_input_ids=torch.full((5, 1), config.bos_id),
                num_beams=beam_size,
                max_new_tokens=12,
                do_sample=False,
            )[:, 1:]
        found = generate(
            params,
            config,
            src,
            max_new_tokens=12,
            beam_size=beam_size,
            length_penalty=1.0,
            length_normalization="power",
            early_stopping=False,
            allow_padding=True,
        )
        for row, (ids, length) in enumerate(
            zip(np.asarray(found.tokens[:, 0]), np.asarray(found.lengths[:, 0]), strict=True)
        ):
            assert ids[:length].tolist() == theirs[row, :length].tolist()


@pytest.mark.parametrize("name", tiered(PUBLISHED, ["tiny.en", "large-v3"]))
def test_the_config_of_a_published_size_is_read_and_written(name):
    values = published(name).to_dict() | {"architectures": [FAMILY.architecture]}
    config = config_from_json(FAMILY, values)
    vocabulary, encoder, decoder, width, heads, bands = PUBLISHED[name]
    assert (config.num_encoder_layers, config.num_decoder_layers) == (encoder, decoder)
    assert (config.d_model, config.num_heads, config.source_features) == (width, heads, bands)
    assert (config.stack("encoder").max_length, config.max_length) == (1500, 448)
    # <|startoflm|>, by the tables of openai's tokenizer: after EOS, the start, the languages and
    # two tasks.
    languages = 100 if vocabulary == 51_866 else 99
    assert config.pad_id == config.eos_id + 1 + languages + 2 + 1
    written = config_to_json(FAMILY, config)
    assert {key: values.get(key, False) for key in written} == written
    count = sum(
        leaf.size
        for leaf in jax.tree.leaves(
            jax.eval_shape(
                functools.partial(jax_transformer.init_params, config=config), jax.random.key(0)
            )
        )
    )
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(published(name))
    assert count == sum(leaf.numel() for leaf in model.parameters())


FORMS = ("safetensors", "bin", "shards", "half", "base class")


@pytest.mark.parametrize("form", tiered(FORMS, ["safetensors"]))
def test_a_folder_comes_back_bit_for_bit(tmp_path, form):
    model = foreign_model(torch.float16 if form == "half" else torch.float32)
    folder, home = tmp_path / "model", tmp_path / "home"
    saved = model.model if form == "base class" else model
    saved.save_pretrained(folder, max_shard_size="20KB" if form == "shards" else "1GB")
    if form == "bin":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    if form == "base class":
        config, params = from_huggingface(folder)
        assert_same_params(params, from_huggingface(model)[1])
        return
    config, params = goes_home(folder, home)
    again = strictly_loaded(type(model), home)
    for name, leaf in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], leaf), name
    assert again.config.to_diff_dict() == type(model).from_pretrained(folder).config.to_diff_dict()
    fresh = tmp_path / "fresh"
    to_huggingface(params, config, fresh, family="whisper")
    assert read_values(fresh)["pad_token_id"] == 50
    assert not any("k_proj.bias" in name for name in weights_of(fresh))
    assert_same_params(from_huggingface(fresh)[1], params)


def test_the_encoder_alone(tmp_path):
    model = foreign_model()
    model.save_pretrained(tmp_path)
    config, params = read_in_float64(tmp_path, part="encoder")
    src, _ = batch(model)
    with jax.enable_x64(True), torch.no_grad():
        expected = model.model.encoder(as_features(src)).last_hidden_state
        assert error(encode(params, config, src), expected) <= 1e-12
    tensors, _ = to_tensors(params, config, FAMILY.layout)
    own = {n: x for n, x in model.state_dict().items() if n.startswith("model.encoder.")}
    assert tensors.keys() == own.keys()
    assert all(np.array_equal(tensors[name], leaf) for name, leaf in own.items())
    again, _ = to_params(tensors, config, FAMILY.layout)
    assert_same_params(again, params)


def test_shorter_sounds_and_masks():
    """transformers takes 30 seconds alone; a prefix of the frames is a prefix of the positions."""
    model = foreign_model()
    config, params = read_in_float64(model)
    src, tgt = batch(model)
    reference = torch_reference.Transformer(config).double().eval()
    tensors = jax_transformer.convert.to_torch(params, config)
    reference.load_state_dict(tensors)
    with jax.enable_x64(True), torch.no_grad():
        for frames in (1, 2, 7, 12):
            short = src[:, :frames]
            memory = encode(params, config, short)
            assert memory.shape[1] == (frames + 1) // 2
            expected = reference(torch.from_numpy(short), torch.from_numpy(tgt))
            assert error(decode(params, config, tgt, memory), expected) <= 1e-13
        mask = (np.arange(15) < np.array([[15], [4], [9]]))[:, None, None]
        cut = np.where((np.arange(30) < np.array([[30], [8], [18]]))[..., None], src, np.nan)
        masked = encode(params, config, src, mask)
        assert np.isfinite(encode(params, config, np.nan_to_num(cut), mask)).all()
        assert error(masked[0], encode(params, config, src)[0]) <= 1e-13


REFUSED = {
    "num_mel_bins=0 must be": {"num_mel_bins": 0},
    "must equal encoder_attention_heads=4": {"decoder_attention_heads": 6},
    'activation_function="tanh" must be': {"activation_function": "tanh"},
    "is_encoder_decoder=False must be true": {"is_encoder_decoder": False},
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_config_that_the_model_cannot_have_is_refused(fault):
    values = transformers.WhisperConfig(**SMALL).to_dict() | REFUSED[fault]
    with pytest.raises(InputError) as caught:
        config_from_json(FAMILY, json.loads(json.dumps(values)))
    assert fault.replace('"', "'") in str(caught.value).replace('"', "'")


def test_what_acts_in_training_alone_is_noted():
    values = {"apply_spec_augment": True, "encoder_layerdrop": 0.1}
    assert len(notes(FAMILY, values)) == 2
    assert notes(FAMILY, {}) == []


def test_padding_is_no_token_of_a_text():
    assert padding_beside(51_865, 50_257, 80) == 50_360
    assert padding_beside(51_869, 50_257, 80) == 50_360  # with four added tokens
    assert padding_beside(51_866, 50_257, 128) == 50_361
    assert padding_beside(90, 0, 80) == 1
    assert padding_beside(90, 4, 80) == 0


BAD = {
    r"src of shape \(3, 30, 9\) must be vectors \[batch, frames, source_features=10\]": (
        lambda src: src[:, :, :9]
    ),
    r"src of dtype int64 must hold floating-point numbers": lambda src: src.astype(np.int64),
    r"src is 16 tokens long, but the position table ends at max_length=15": (
        lambda src: np.concatenate([src, src[:, :1]], axis=1)
    ),
    r"src of shape \(30, 10\) must be vectors": lambda src: src[0],
}


@pytest.mark.parametrize("fault", BAD)
def test_sound_of_another_form_is_refused(fault):
    model = foreign_model(torch.float32)
    config, params = from_huggingface(model)
    src = BAD[fault](batch(model)[0])
    with unchecked(), pytest.raises(InputError, match=fault):
        encode(params, config, src)
    with unchecked(), pytest.raises(InputError, match=fault):
        generate(params, config, src, max_new_tokens=2)


def test_options_that_count_tokens_of_a_source_are_refused():
    model = foreign_model(torch.float32)
    config, params = from_huggingface(model)
    src = batch(model)[0].astype(np.float32)
    for option in ({"max_length_factor": 2.0}, {"encoder_no_repeat_ngram_size": 2}):
        with pytest.raises(InputError, match="counts tokens of a source of sound"):
            generate(params, config, src, max_new_tokens=2, **option)


def test_fields_of_sound_that_contradict_others_are_refused():
    config = config_from_json(FAMILY, transformers.WhisperConfig(**SMALL).to_dict())
    for fields, fault in (
        ({"token_embeddings": "shared"}, "token_embeddings='shared' needs sources of ids"),
        ({"source_features": None}, "encoder_max_length=15 needs source_features"),
        ({"qkv_bias": False}, "key_bias=False must be True where qkv_bias=False"),
        ({"source_features": 0}, "source_features=0"),
    ):
        with pytest.raises(InputError, match=fault):
            dataclasses.replace(config, **fields)
