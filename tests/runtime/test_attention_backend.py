"""The rule that chooses attention, and what is handed to cuDNN: computed by XLA, and lowered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import apply, functional
from jax_transformer.commands import train
from jax_transformer.errors import InputError
from jax_transformer.runtime import attention_backend
from jax_transformer.runtime.attention_backend import Choice, choose
from tests.models import random_params, random_tokens, small_config
from tests.parity.ladder import error

BATCH, HEADS, HEAD_DIM = 3, 2, 8
HOPPER = {"backend": "gpu", "compute_capability": "9.0", "dtype": "bfloat16", "head_dim": 64}
HOPPER |= {"dropped": False}


@pytest.mark.parametrize("change", [{}, {"dtype": "float16"}, {"head_dim": 256}, {"head_dim": 8}])
def test_cudnn_is_chosen_within_its_limits(change):
    assert choose(**HOPPER | change) == Choice("cudnn")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"backend": "cpu", "compute_capability": ""}, "cpu; cuDNN needs a GPU"),
        ({"backend": "tpu", "compute_capability": ""}, "tpu; cuDNN needs a GPU"),
        ({"compute_capability": "7.5"}, "a GPU 7.5; cuDNN needs NVIDIA's, from 8.0"),
        ({"compute_capability": "gfx942"}, "a GPU gfx942; cuDNN needs NVIDIA's, from 8.0"),
        ({"dtype": "float32"}, "float32; cuDNN needs bfloat16"),
        ({"dtype": "float64"}, "float64; cuDNN needs bfloat16"),
        ({"head_dim": 20}, "head_dim=20; cuDNN needs a multiple of 8, at most 256"),
        ({"head_dim": 264}, "head_dim=264; cuDNN needs a multiple of 8, at most 256"),
        (
            {"head_dim": 136, "compute_capability": "8.6"},
            "head_dim=136; cuDNN needs a multiple of 8, at most 128",
        ),
        (
            {"head_dim": 136, "compute_capability": "10.0"},
            "head_dim=136; cuDNN needs a multiple of 8, at most 128",
        ),
        ({"dropped": True}, "attention weights are dropped; cuDNN through JAX drops none"),
    ],
)
def test_beyond_them_attention_is_plain_and_says_why(change, reason):
    choice = choose(**HOPPER | change)
    assert choice == Choice("plain", reason)
    assert str(choice) == f"attention: plain ({reason})"


def test_a_run_says_which_one_it_uses(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise InputError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.loop, "train", stop)
    with pytest.raises(SystemExit):
        train.train()
    choice = attention_backend.choose_here("float32", 16, False)
    assert f"\n{choice}\n" in capsys.readouterr().out


@pytest.fixture
def asked(monkeypatch):
    """Return what the rule is asked: dtype, head_dim, and whether weights are dropped."""
    questions = []

    def choose_here(*question):
        questions.append(question)
        return Choice("plain", "")

    monkeypatch.setattr(attention_backend, "choose_here", choose_here)
    return questions


@pytest.mark.parametrize(("rate", "with_key"), [(0.1, True), (0.1, False), (0.0, True)])
def test_a_model_asks_for_what_it_computes(asked, rate, with_key):
    config = small_config("vaswani2017", dropout=0.1, attention_dropout=rate)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), random_params(config))
    key = jax.random.key(0) if with_key else None
    asked.clear()  # of what the making of parameters asked
    jax.eval_shape(lambda: apply(params, config, *random_tokens(config), dropout_key=key))
    assert set(asked) == {("bfloat16", config.head_dim, rate > 0 and with_key)}


@pytest.fixture
def on_gpu(monkeypatch):
    """Choose cuDNN whatever the machine, and let XLA do its work; return the shapes of masks."""
    shapes, attention = [], jax.nn.dot_product_attention

    def by_xla(query, key, value, *, mask, implementation):
        assert implementation == "cudnn"
        shapes.append(None if mask is None else mask.shape)
        return attention(query, key, value, mask=mask, implementation="xla")

    monkeypatch.setattr(attention_backend, "choose_here", lambda *_: Choice("cudnn"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    return shapes


def draw(queries, keys, dtype):
    """Return queries, keys, values, and what the gradient of the output shall be."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, HEADS, length, HEAD_DIM) for length in (queries, keys, keys, queries)]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def masks(queries, keys):
    random = np.random.default_rng(1)
    padding = np.arange(keys) < np.array([keys, keys - 2, 0])[:, None, None, None]
    some = random.random((BATCH, HEADS, queries, keys)) < 0.6
    some[0, 1, 2] = False
    some[1, :, :, 3] = False
    later = np.tril(np.ones((1, 1, queries, keys), bool))
    drawn = {"padding": padding, "causal": padding & later, "some": some}
    return {"none": None} | {kind: jnp.asarray(mask) for kind, mask in drawn.items()}


def attend_and_differentiate(query, key, value, cotangent, mask):
    @jax.jit
    def run(query, key, value):
        mapped = lambda *inputs: functional.dot_product_attention(*inputs, mask)  # noqa: E731
        output, transpose = jax.vjp(mapped, query, key, value)
        return output, *transpose(cotangent)

    return run(query, key, value)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("lengths", [(6, 8), (7, 5)])
@pytest.mark.parametrize("kind", ["none", "padding", "causal", "some"])
def test_what_cudnn_is_handed_gives_what_the_plain_products_give(
    request, kind, lengths, dtype, bound
):
    inputs, mask = draw(*lengths, dtype), masks(*lengths)[kind]
    expected = attend_and_differentiate(*inputs, mask)
    shapes = request.getfixturevalue("on_gpu")
    found = attend_and_differentiate(*inputs, mask)
    for name, ours, plain in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert ours.dtype == plain.dtype == dtype
        assert error(*(np.float32(array) for array in (ours, plain))) < bound, name
    (shape,) = shapes
    if mask is not None:  # as cuDNN's backward pass wants it
        assert shape[2:] == tuple(length + length % 2 for length in lengths)


def test_there_too_no_attention_is_0_and_what_nobody_attends_to_does_not_count(on_gpu):
    query, key, value, cotangent = draw(6, 8, "float32")
    mask = masks(6, 8)["some"]
    nobody = ~mask.any(axis=2)[..., None]
    key, value = jnp.where(nobody, jnp.nan, key), jnp.where(nobody, jnp.inf, value)
    output, *gradients = attend_and_differentiate(query, key, value, cotangent, mask)
    assert nobody.any()
    assert np.array_equal(output[0, 1, 2], np.zeros(HEAD_DIM))
    for array in (output, *gradients):
        assert np.isfinite(array).all()


def test_a_cpu_computes_plainly(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("not here")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    if jax.default_backend() == "cpu":
        attend_and_differentiate(*draw(6, 8, "bfloat16"), None)
    attend_and_differentiate(*draw(6, 8, "float32"), None)


@pytest.mark.parametrize("lengths", [(12, 10), (13, 11)])
def test_a_model_lowers_to_cudnns_kernels(monkeypatch, lengths):
    config = small_config("vaswani2017", d_model=48, num_encoder_layers=2, num_decoder_layers=1)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), random_params(config))
    src, tgt = (jnp.ones((4, length), jnp.int32) for length in lengths)
    monkeypatch.setattr(attention_backend, "choose_here", lambda *_: Choice("cudnn"))
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91000)  # the installed one's, where there is one

    def loss(params):
        return apply(params, config, src, tgt).astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r"custom_call @__cudnn\$(\w+)", program)
    attentions = 2 + 2 * 1  # an encoder layer has one, a decoder layer two
    assert (
        sorted(kernels)
        == ["fmhaScaleBiasSoftmax"] * attentions + ["fmhaScaleBiasSoftmaxBackward"] * attentions
    )
