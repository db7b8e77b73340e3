"""Greedy decoding against a plain loop over `apply`, its bookkeeping, and refused input."""

import jax
import numpy as np
import pytest

from jax_transformer import InputError, TransformerConfig, apply, decoding
from jax_transformer.decoding import generate
from tests.models import SOURCE_LENGTH, random_params, random_tokens, small_config

MAX_NEW_TOKENS = 15  # more than SOURCE_LENGTH
VOCABULARIES = ("src_vocab_size", "tgt_vocab_size")
PRESETS = [name for name in TransformerConfig.presets() if name != "torch_nn"]


def model(preset, seed=0, **overrides):
    """Return a model of so few ids that some rows end by chance, and its sources."""
    small = {"num_encoder_layers": 1, "num_decoder_layers": 1} | dict.fromkeys(VOCABULARIES, 8)
    if preset == "marian":
        small |= {"pad_id": 7, "bos_id": 7}
    config = small_config(preset, **(small | overrides))
    return config, random_params(config, seed), random_tokens(config, seed)[0]


def plain_greedy(params, config, src, max_new_tokens):
    """Extend each target by the likeliest token, one whole forward pass a token."""
    length = max_new_tokens
    if config.decoder_attention == "self_over_memory":
        length = max(length, src.shape[1])
        src = np.pad(src, ((0, 0), (0, length - src.shape[1])), constant_values=config.pad_id)
    run = jax.jit(apply, static_argnames="config")
    results = []
    for row in range(len(src)):
        tokens, score = [], 0.0
        while len(tokens) < max_new_tokens and config.eos_id not in tokens:
            tgt = np.full((1, length), config.pad_id, np.int32)
            tgt[0, : len(tokens) + 1] = [config.bos_id, *tokens][:length]
            logits = run(params, config, src[row : row + 1], tgt)[0, len(tokens)]
            tokens.append(int(np.argmax(logits)))
            score += float(jax.nn.log_softmax(logits)[tokens[-1]])
        results.append((tokens, score))
    return results


@pytest.mark.parametrize("preset", PRESETS)
def test_is_the_plain_loop(preset):
    config, params, src = model(preset)
    expected = plain_greedy(params, config, src, MAX_NEW_TOKENS)
    hypotheses = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    assert hypotheses.tokens.shape == (len(src), 1, MAX_NEW_TOKENS)
    for row, (tokens, score) in enumerate(expected):
        padding = [config.pad_id] * (MAX_NEW_TOKENS - len(tokens))
        assert hypotheses.tokens[row, 0].tolist() == tokens + padding
        assert hypotheses.lengths[row, 0] == len(tokens)
        assert hypotheses.scores[row, 0] == pytest.approx(score, abs=1e-4)


def biased(*favourites):
    """Return a model that, whatever the source, finds these ids the likeliest, all equally."""
    config, params, src = model("vaswani2017", output_projection="linear", output_bias=True)
    params["output_projection"] = {
        "kernel": np.zeros((config.d_model, config.tgt_vocab_size), np.float32),
        "bias": np.zeros(config.tgt_vocab_size, np.float32),
    }
    params["output_projection"]["bias"][[*favourites]] = 10
    return config, params, src


def test_a_row_that_never_ends_is_full_and_has_no_end():
    config, params, src = biased(7)
    hypotheses = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    assert (hypotheses.tokens == 7).all()
    assert (hypotheses.lengths == MAX_NEW_TOKENS).all()


def test_an_end_at_once_is_all():
    config, params, src = biased(2)
    hypotheses = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    assert (hypotheses.tokens[..., 0] == config.eos_id).all()
    assert (hypotheses.tokens[..., 1:] == config.pad_id).all()
    assert (hypotheses.lengths == 1).all()
    # One token of probability e^10 / (e^10 + 7), and nothing for the padding after it.
    expected = -np.log1p(7 * np.exp(-10))
    np.testing.assert_allclose(hypotheses.scores, expected, rtol=0, atol=1e-6)


def test_ties_take_the_lowest_id():
    config, params, src = biased(6, 4, 5)
    assert (generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS).tokens == 4).all()


def test_neighbours_and_padding_do_not_matter():
    config, params, src = model("vaswani2017")
    together = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    row = np.pad(src[1:2], ((0, 0), (0, 4)))
    alone = generate(params, config, row, max_new_tokens=MAX_NEW_TOKENS)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[1])
    np.testing.assert_allclose(alone.scores[0], together.scores[1], atol=1e-5)


def test_a_target_may_be_shorter_than_the_source_it_is_as_long_as():
    config, params, src = model("shared_heads")
    expected = plain_greedy(params, config, src, max_new_tokens=3)
    hypotheses = generate(params, config, src, max_new_tokens=3)
    assert hypotheses.tokens.shape == (len(src), 1, 3)
    assert hypotheses.lengths[:, 0].tolist() == [len(tokens) for tokens, _ in expected]


@pytest.mark.parametrize("preset", ["vaswani2017", "shared_heads"])
def test_a_source_mask_takes_the_place_of_the_padding(preset):
    config, params, src = model(preset)
    expected = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    for mask in ((src != config.pad_id)[:, None, None, :], np.ones((1, 1, 1, 1), bool)):
        masked = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS, src_mask=mask)
        same = np.array_equal(masked.scores, expected.scores)
        assert same == (mask.size > 1)


def test_works_under_jit():
    config, params, src = model("vaswani2017")
    jitted = jax.jit(generate, static_argnames=("config", "max_new_tokens"))
    expected = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    actual = jitted(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_ids_of_any_integer_type_are_the_same_ids(dtype):
    config, params, src = model("vaswani2017")
    hypotheses = generate(params, config, src.astype(dtype), max_new_tokens=MAX_NEW_TOKENS)
    expected = generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
    assert hypotheses.tokens.dtype == np.int32
    np.testing.assert_array_equal(hypotheses.tokens, expected.tokens)


def test_the_loop_ends_with_the_last_row(monkeypatch):
    """Counts the calls that the compiled program makes: one of encode, one of decode a token."""
    config, params, src = model("pre_norm_memory_norm")
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            jax.debug.callback(lambda: calls.append(function.__name__))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(decoding, "encode", counted(decoding.encode))
    monkeypatch.setattr(decoding, "decode", counted(decoding.decode))
    hypotheses = generate(params, config, src[:2], max_new_tokens=MAX_NEW_TOKENS)
    jax.effects_barrier()
    assert calls.count("encode") == 1
    assert calls.count("decode") == hypotheses.lengths.max()
    assert 1 < hypotheses.lengths.max() < MAX_NEW_TOKENS


def test_a_model_without_ids_is_refused():
    config = small_config("torch_nn")
    with pytest.raises(InputError, match="token_embeddings='none'"):
        generate({}, config, np.zeros((1, 2), np.int32), max_new_tokens=2)
    hidden = small_config("vaswani2017", output_projection="none", output_bias=False)
    with pytest.raises(InputError, match="output_projection='none'"):
        generate({}, hidden, np.zeros((1, 2), np.int32), max_new_tokens=2)


def test_lengths_and_ids_that_do_not_fit_are_refused():
    config, params, src = model("vaswani2017")

    def attempt(src=src, max_new_tokens=2, **arguments):
        generate(params, config, src, max_new_tokens=max_new_tokens, **arguments)

    with pytest.raises(InputError, match="max_new_tokens=0"):
        attempt(max_new_tokens=0)
    with pytest.raises(InputError, match=r"30 .*max_length=29"):
        attempt(max_new_tokens=30)
    with pytest.raises(InputError, match=r"src is 30 .*max_length=29"):
        attempt(src=np.ones((1, 30), np.int32))
    for outside in (-1, 8, 2**31):
        with pytest.raises(InputError, match=rf"src\[0, 1\]={outside}"):
            attempt(src=np.array([[5, outside]]))
    with pytest.raises(InputError, match="third axis"):
        attempt(src_mask=np.ones((1, 1, SOURCE_LENGTH, SOURCE_LENGTH), bool))
