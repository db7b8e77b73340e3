"""What is refused, before any work; what a new value or a new shape compiles; numbers that fail."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_transformer import InputError, generate
from jax_transformer.decoding import GenerationConfig, generation
from jax_transformer.model.checks import check_generates
from tests.decoding.plain import assert_equal, quick_generate, random_model
from tests.decoding.reversing import sources
from tests.models import SOURCE_LENGTH, random_params, random_tokens, small_config, unchecked

KEY = jax.random.key(0)
REFUSED = [
    ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number, at least 1"),
    ({"max_new_tokens": 30}, "30 .*max_length=29"),
    ({"src": np.ones((1, 30), np.int32)}, "src is 30 .*max_length=29"),
    ({"src": np.array([[5, -1]])}, r"src\[0, 1\]=-1"),
    ({"src": np.array([[5, 8]])}, r"src\[0, 1\]=8"),
    ({"src_mask": np.ones((1, 1, 2, SOURCE_LENGTH), bool)}, r"= \[5, 3, 1, 13\]"),
    ({"memory": np.ones((5, 12, 42), np.float32)}, r"as src, which is \[5, 13, 42\]"),
    ({"memory": np.ones((5, 13, 41), np.float32)}, r"memory of shape \(5, 13, 41\) .*d_model=42"),
    ({"beam_size": 5, "max_new_tokens": 3}, "beam_size=5 needs .*10 tokens.*tgt_vocab_size=8"),
    ({"num_hypotheses": 2}, "num_hypotheses=2 .*beam_size=1"),
    ({"beam_size": 2, "num_hypotheses": 3}, "num_hypotheses=3 .*beam_size=2"),
    ({"min_new_tokens": 4}, "min_new_tokens=4 must be from 0 to 3"),
    ({"banned_tokens": (3, 8)}, r"banned_tokens\[1\]=8"),
    ({"banned_tokens": tuple(range(8))}, "leaves no token"),
    ({"forced_first_token": 8}, "forced_first_token=8 is outside"),
    ({"start_token": 8}, "start_token=8 is outside"),
    ({"start_token": np.array([1, 2, 3, 4, 8])}, r"start_token\[0, 4\]=8"),
    ({"start_token": np.array([1, 2])}, r"start_token of shape \(2,\) .*5 sources"),
    ({"eos_ids": ()}, r"eos_ids=\(\)"),
    ({"eos_ids": (2, 9)}, r"eos_ids\[1\]=9"),
    ({"beam_size": 3, "eos_ids": (2, 3)}, "beam_size=3 needs .*9 tokens"),
    ({"banned_sequences": ((3, 4), (5, 8))}, r"banned_sequences\[1\]\[1\]=8"),
    ({"banned_sequences": ((3,), ())}, r"banned_sequences.*\[1\]"),
    ({"begin_suppressed_tokens": (3, 8)}, r"begin_suppressed_tokens\[1\]=8"),
    ({"length_limits": np.array([4, 4, 0, 4, 4])}, r"length_limits\[2\]=0 .*max_new_tokens=4"),
    ({"length_limits": np.full(4, 4)}, r"length_limits of shape \(4,\) .*5 sources"),
    ({"prefix": np.array([[3, -2]] * 5)}, r"prefix\[0, 1\]=-2"),
    ({"prefix": np.full((4, 1), 3)}, r"prefix of shape \(4, 1\) .*5 sources"),
    ({"prefix": np.full((5, 0), 3)}, r"\(5, 0\) .*at least 1 column"),
    ({"prefix": np.full((5, 26), 3)}, "26 tokens and max_new_tokens=4 exceed .*max_length=29"),
    ({"prefix": np.array([[3, 4, 0]] * 4 + [[3, 0, 4]])}, r"prefix\[4, 2\]=4 follows padding"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size=0"),
    ({"temperature": 1.0}, "temperature=1.0 .*needs a key"),
    ({"key": KEY, "top_p": 1.1}, "top_p=1.1"),
    ({"key": KEY, "top_k": 9}, "top_k=9 must be from 1 to 8"),
    ({"key": KEY, "beam_size": 2}, "beam_size=2 searches"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_in_one_line(options, message):
    config, params, src = random_model("vaswani2017")
    options = {"src": src, "max_new_tokens": 4} | options
    with unchecked(), pytest.raises(InputError, match=message) as refusal:  # as users call it
        generate(params, config, **options)
    assert "\n" not in str(refusal.value)


NUMBERS = ("temperature", "top_p", "repetition_penalty", "length_penalty")
WHOLE_NUMBERS = (
    "max_new_tokens",
    "beam_size",
    "num_hypotheses",
    "min_new_tokens",
    "forced_first_token",
    "forced_last_token",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "top_k",
)
IDS = ("eos_ids", "banned_tokens", "begin_suppressed_tokens", "banned_sequences")
NO_NUMBERS = ("a", np.nan, np.inf, [1.0], True, 1j, np.ones((2, 2)), 1e300, -1e6)
NO_NUMBERS += (10**5000, -(10**400))
NO_WHOLE_NUMBERS = ("a", 2.0, True, np.nan, [2], -1, np.ones((2, 2), int))
NO_IDS = (2, "ab", (2.5,), (None,), (True,), (10**5000,), ((1.5,),))
NO_FLAGS = ("a", None, 1, 0.5)
OTHERS = {
    "allow_padding": NO_FLAGS,
    "renormalize": NO_FLAGS,
    "early_stopping": (0, 1.0, None, np.ones(3), [True]),
    "length_normalization": (None, 1, np.ones(3), ["gnmt"]),
    "start_token": ("a", 2.0, np.full(5, 2.0), np.ones(5, bool), [1] * 5, np.ones((5, 1), int)),
    "length_limits": (2, np.full(5, 2.0), np.ones(5, bool), [1] * 5, np.ones((5, 1), int)),
    "key": (0, "a", np.zeros(3, np.uint32), jax.random.split(KEY, 3)),
}
WRONG = (
    dict.fromkeys(NUMBERS, NO_NUMBERS)
    | dict.fromkeys(WHOLE_NUMBERS, NO_WHOLE_NUMBERS)
    | dict.fromkeys(IDS, NO_IDS)
    | OTHERS
)


@pytest.mark.parametrize(("name", "values"), WRONG.items(), ids=WRONG)
def test_a_value_of_another_kind_is_refused_in_one_line(name, values):
    config = small_config("vaswani2017", src_vocab_size=8, tgt_vocab_size=8)
    params, (src, _) = random_params(config), random_tokens(config)
    options = {"max_new_tokens": 4, "key": KEY} if name in ("temperature", "top_p", "top_k") else {}
    for value in values:
        with unchecked(), pytest.raises(InputError, match=name) as refusal:  # as users call it
            generate(params, config, src, **{"max_new_tokens": 4} | options | {name: value})
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [("start_token", np.full(5, 2.0)), ("length_limits", np.full(5, 2.0)), ("temperature", True)],
)
def test_a_type_is_refused_under_jit(name, value):
    config = small_config("vaswani2017")
    params, (src, _) = random_params(config), random_tokens(config)
    options = {"key": KEY} if name == "temperature" else {}

    def run(value):
        return generate(params, config, src, max_new_tokens=4, **options, **{name: value})

    with unchecked(), pytest.raises(InputError, match=name):
        jax.jit(run)(value)


def test_a_config_and_keywords_say_the_same():
    config, params, src = random_model("vaswani2017")
    made = GenerationConfig(4, beam_size=2, length_penalty=0.6)
    found = [
        generate(params, config, src, made),
        generate(params, config, src, max_new_tokens=4, beam_size=2, length_penalty=0.6),
        generate(params, config, src, replace(made, max_new_tokens=9), max_new_tokens=4),
    ]
    for other in found[1:]:
        assert_equal(found[0], other)
    for wrong in ({"max_new_tokens": 4}, 4):
        with unchecked(), pytest.raises(InputError, match=r"^generation=.* must be a G"):
            generate(params, config, src, wrong)


def test_numbers_of_numpy_are_numbers():
    numbers = {
        "max_new_tokens": np.int64(4),
        "beam_size": np.int32(2),
        "num_hypotheses": np.uint8(2),
        "length_penalty": np.float64(0.6),
        "early_stopping": np.bool_(True),
        "allow_padding": np.bool_(False),
        "banned_tokens": np.array([3, 4]),
        "repetition_penalty": np.float32(1.5),
        "forced_first_token": np.array(5),
    }
    plain = {name: np.asarray(value).tolist() for name, value in numbers.items()}
    plain["banned_tokens"] = (3, 4)
    with unchecked():
        found = GenerationConfig(**numbers)
    assert found == GenerationConfig(**plain)
    assert {type(getattr(found, name)) for name in numbers} == {int, float, bool, tuple}


def test_a_model_without_ids_is_refused():
    config = small_config("torch_nn")
    with pytest.raises(InputError, match="token_embeddings='none'"):
        generate(random_params(config), config, np.zeros((1, 2), np.int32), max_new_tokens=2)
    hidden = small_config("vaswani2017", output_projection="none", output_bias=False)
    with pytest.raises(InputError, match="output_projection='none'"):
        check_generates(hidden)


def spoil(params, table, row, value):
    params = jax.tree.map(np.array, params)
    params[table]["embedding"][row] = value
    return params


@pytest.mark.exhaustive
def test_a_source_that_is_not_finite_is_named_and_spoils_no_neighbour():
    config, params, src = random_model("pre_norm")
    src[src == 7] = 6
    src[3, 0] = 7
    bad = spoil(params, "source_embedding", 7, np.inf)
    options = {"max_new_tokens": 6, "beam_size": 3}
    with pytest.raises(InputError, match=r"src\[3\] are NaN or infinite at step 0"):
        generate(bad, config, src, **options)
    good = quick_generate(params, config, src, **options)
    spoiled = quick_generate(bad, config, src, **options)
    assert np.isnan(spoiled.scores).tolist() == [[row == 3] for row in range(5)]
    for a, b in zip(good, spoiled, strict=True):
        np.testing.assert_array_equal(np.delete(a, 3, axis=0), np.delete(b, 3, axis=0))


def test_a_step_that_is_not_finite_is_named():
    """Rows fail at the step that reads the token whose vector is NaN; the others never do."""
    config, params, src = random_model("pre_norm_memory_norm", seed=4)
    good = quick_generate(params, config, src, max_new_tokens=6)
    words = np.asarray(good.tokens[:, 0, :-1])  # nothing reads the last one
    token = next(word for word in range(3, 8) if 0 < (words == word).any(axis=1).sum() < 5)
    bad = spoil(params, "target_embedding", token, np.nan)
    spoiled = quick_generate(bad, config, src, max_new_tokens=6)
    np.testing.assert_array_equal(np.isnan(spoiled.scores[:, 0]), (words == token).any(axis=1))
    row, step = np.argwhere(words == token)[0]
    with pytest.raises(InputError, match=rf"src\[{row}\] .* at step {step + 1}:"):
        generate(bad, config, src, max_new_tokens=6)


@pytest.mark.usefixtures("fresh_caches")
def test_one_compilation_for_each_shape_and_set_of_options():
    """Lengths in buckets, new values of what is data: one compilation for each bucket."""
    config, params, _ = random_model("vaswani2017", vocab_size=18)
    src = sources(config, 4, seed=13)
    count = generation.search._cache_size

    def compiled(lengths=range(1, 9), **options):
        before = count()
        for length in lengths:
            bucket = 4 if length <= 4 else 8
            batch = np.zeros((4, bucket), np.int32)
            batch[:, :length] = src[:, :length]
            data = {name: value(length) for name, value in options.items() if callable(value)}
            generate(params, config, batch, max_new_tokens=bucket, **(options | data))
        return count() - before

    assert compiled(length_penalty=lambda n: n / 8, banned_tokens=lambda n: (n,)) == 2
    data = {
        "length_penalty": lambda n: n / 9,
        "banned_tokens": lambda n: (n, n + 1),
        "eos_ids": lambda n: (n + 2,),
        "start_token": lambda n: n,
        "allow_padding": lambda n: n % 2 == 0,
        "early_stopping": lambda n: n % 2 == 0,  # of no use to greedy search
        "length_limits": lambda n: np.full(4, 1 + n % 4),
    }
    assert compiled(**data) == 0
    assert compiled(start_token=lambda n: np.arange(4) + n) == 0
    assert compiled((1, 4), beam_size=2, length_penalty=lambda n: n / 8) == 1
    assert (
        compiled(
            lengths=(1, 2, 4),
            key=lambda n: jax.random.key(n),
            temperature=lambda n: 1 + n / 10,
            top_p=lambda n: n / 10,
            repetition_penalty=lambda n: 1 + n / 10,
            prefix=lambda n: np.arange(8).reshape(4, 2) + 1 + n % 2,
            forced_first_token=lambda n: n,
            forced_last_token=lambda n: n,
            min_new_tokens=lambda n: n % 3,
            banned_sequences=lambda n: ((n, n + 1), (n + 2, 1, n)),
            begin_suppressed_tokens=lambda n: (n, 3)[: 1 + n % 2],
        )
        == 1
    )


@pytest.mark.exhaustive
def test_works_under_transformations():
    """Under `jit` with traced values, and under `vmap` as row by row."""
    config, params, src = random_model("vaswani2017")
    options = {"max_new_tokens": 5, "beam_size": 2, "forced_last_token": 2}
    rows = {
        "start_token": np.arange(1, 6),
        "prefix": np.array([[3, 4], [5, 0], [0, 0], [2, 3], [6, 7]]),
        "length_limits": np.array([5, 4, 3, 2, 1]),
    }
    expected = generate(params, config, src, **rows, **options)
    found = quick_generate(params, config, src, **rows, **options)
    by_row = jax.vmap(lambda src, rows: generate(params, config, src, **rows, **options))(
        src[:, None], jax.tree.map(lambda leaf: leaf[:, None], rows)
    )
    for a, b, c in zip(expected, found, by_row, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c[:, 0], rtol=1e-6)
    sampled = {"max_new_tokens": 5, "key": KEY, "temperature": 0.7, "top_p": 0.9}
    for a, b in zip(
        quick_generate(params, config, src, **sampled),
        generate(params, config, src, **sampled),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
