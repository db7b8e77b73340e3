"""Config and layout of models that nobody described, with and without a record of their numbers."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer import apply, convert
from jax_transformer.errors import InputError
from jax_transformer.porting.record import Record, record_module
from jax_transformer.porting.search import Alternative
from jax_transformer.porting.suggest import suggest
from jax_transformer.storage.weights.arrays import as_numpy
from tests.convert.foreign import randomized
from tests.porting.foreign_models import MODELS
from tests.porting.renamed import recorded, renamed
from tests.tiers import tiered, tiered_rows

# Models whose answers are found from logits alone in a few seconds.
LOGITS_ALONE = ("fused_columns", "clones")


class FromTransformers(torch.nn.Module):
    """A model of transformers, called with ids alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, src, tgt):
        seen = (src != self.model.config.pad_token_id).long()
        options = {"decoder_input_ids": tgt, "use_cache": False}
        return self.model(input_ids=src, attention_mask=seen, **options).logits


T5 = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3}
T5 |= {"num_heads": 4, "vocab_size": 61}
BART = {f"{side}_layers": 2 for side in ("encoder", "decoder")}
BART |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
BART |= {f"{side}_ffn_dim": 40 for side in ("encoder", "decoder")}
BART |= {"d_model": 24, "vocab_size": 61, "max_position_embeddings": 32}
FAMILIES = {
    "T5": (T5, {"positions": "relative", "d_kv": 8, "output_scale": "inverse_sqrt_d_model"}),
    "UMT5": (T5, {"relative_attention_bias": "per_layer", "attention_scale": "none"}),
    "M2M100": (BART, {"positions": "sinusoidal_tensor2tensor", "position_offset": 2}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_are_found_as_unknown_models(family):
    sizes, fields = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    module = randomized(
        FromTransformers(getattr(transformers, f"{family}ForConditionalGeneration")(config))
    )
    weights = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    pad_id = config.pad_token_id
    src, tgt = torch.randint(3, 61, (3, 7)), torch.randint(3, 61, (3, 5))
    padded = src.clone()
    padded[1, 4:] = pad_id
    batches = [(src[:, :1], tgt[:, :1]), (src, tgt), (padded, tgt)]
    records = [record_module(module.double(), *batch, pad_id=pad_id) for batch in batches]
    record = Record(tuple(batch for one in records for batch in one.batches), pad_id)
    suggestion = suggest(weights, record)
    assert suggestion.fits
    assert {name: getattr(suggestion.config, name) for name in fields} == fields


def check_found(name, weights, suggestion):
    """The config is the right one, every tensor comes home, and the logits in JAX agree."""
    model, (_, record) = MODELS[name], recorded(name)
    config, layout = suggestion.config, suggestion.layout
    assert suggestion.fits
    assert {field: getattr(config, field) for field in model.expected} == model.expected
    assert config.pad_id == model.pad_id
    params = convert.from_torch(weights, config, layout)
    back = convert.to_torch(params, config, layout)
    read = weights.keys() - set(layout.unused)
    assert back.keys() == read
    tables = {buffer.foreign for buffer in layout.buffers}
    assert all(np.array_equal(back[key].numpy(), weights[key]) for key in read - tables)
    batch = record.batches[1]  # without padding, it needs no masks of its own
    logits = jax.jit(apply, static_argnames="config")(
        params, config=config, src=batch.src, tgt=batch.tgt
    )
    logits = jax.nn.log_softmax(logits) if model.output == "log_softmax" else logits
    error = np.abs(np.asarray(logits) - batch.output).max() / max(1, np.abs(batch.output).max())
    finding = suggestion.finding
    print(f"{name}: {finding.passes} passes, {finding.seconds:.1f} s, logits {error:.0e}")
    assert error < 1e-5


@pytest.fixture(scope="module", params=tiered(MODELS, ["letters"]))
def case(request):
    """Each model: its name, its weights, and what is suggested with its record."""
    weights, record = recorded(request.param)
    return request.param, weights, suggest(weights, record)


def test_config_and_layout_are_found(case):
    name, weights, suggestion = case
    check_found(name, weights, suggestion)
    hidden = MODELS[name].masks != "none"
    assert suggestion.layout.masks[:2] == (hidden, hidden)
    assert suggestion.layout.masks.causal


@pytest.mark.parametrize(("second", "printed"), [(1.5e-4, 0), (3e-4, 1)])
def test_another_answer_is_printed_where_it_is_clearly_the_nearest(case, second, printed):
    errors = {1e-3: 1e-4, 1e-4: second}
    others = tuple(Alternative("norm_epsilon", *other) for other in errors.items())
    finding = dataclasses.replace(case[2].finding, alternatives=others)
    text = str(dataclasses.replace(case[2], finding=finding))
    assert text.count("norm_epsilon: 0.001 would be 1e-04 off") == printed
    assert text.count(" would be ") == printed


def test_buffers_are_given_back_and_the_others_are_named(tmp_path):
    weights = dict(recorded("letters")[0])
    mask = np.tril(np.ones((1, 1, 9, 9), bool))
    buffers = {
        "position_ids": np.arange(2, 25)[None],
        "dec_layers.0.seen": mask,
        "dec_layers.1.seen": mask,
        "later": np.where(mask[0, 0], np.float32(0), -np.float32(np.inf)),
        "masked_bias": np.float32(-1e4),
        "steps": np.array([7], np.int32),
        "shuffle": np.array([3, 1, 2]),
        "inv_timescales": np.float32(10000) ** -np.linspace(0, 1, 7, dtype=np.float32),
        "dec_layers.0.empty": np.zeros(0, np.float32),
        "dec_layers.1.empty": np.zeros(0, np.float32),
        "half_mask": mask[0].astype(ml_dtypes.bfloat16),
    }
    order = np.random.default_rng(0).permutation(5000)  # a list of so many is not written
    suggestion = suggest(weights | buffers | {"order": order})
    assert suggestion.layout.unused == ("order",)
    (line,) = (line for line in str(suggestion).splitlines() if " order " in line)
    assert line.endswith("not read, and cannot be given back")
    path = tmp_path / "layout.toml"
    convert.write_layout(path, suggestion.layout, suggestion.config)
    layout = convert.read_layout(path).layout
    assert layout == suggestion.layout
    params = convert.from_torch(weights | buffers, suggestion.config, layout)
    back = convert.to_torch(params, suggestion.config, layout)
    assert back.keys() == weights.keys() | buffers.keys()
    for name, array in buffers.items():
        assert as_numpy(back[name]).dtype == array.dtype
        np.testing.assert_array_equal(as_numpy(back[name]), array)
    changed = weights | buffers | {"position_ids": np.arange(23)[None]}
    with pytest.raises(InputError, match=r"position_ids  is 0 at \[0, 0\], computed 2"):
        convert.from_torch(changed, suggestion.config, layout)


@pytest.mark.exhaustive
def test_what_is_certain_without_a_record_is_right(case):
    name, weights, settled = case
    alone = suggest(weights)
    shares = ", ".join(f"{share:.0%} {level}" for level, share in alone.shares.items())
    print(f"{name}: {shares}")
    assert alone.certainty.keys() == weights.keys()
    certain = {
        row
        for row in alone.layout.rows
        for name in (row.foreign.replace("{i}", "0"), row.foreign.replace("{i}", "1"))
        if alone.certainty.get(name) == "certain"
    }
    assert certain <= set(settled.layout.rows)
    assert len(certain) < len(alone.layout.rows)
    assert settled.shares["certain"] == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOGITS_ALONE)
def test_logits_alone_settle_the_questions(name):
    weights, record = recorded(name)
    batches = tuple(batch._replace(blocks={}) for batch in record.batches)
    check_found(name, weights, suggest(weights, Record(batches, record.pad_id)))


def test_the_least_sure_question_decides_how_sure_a_tensor_is():
    suggestion = suggest(recorded("clones")[0])
    layer = "decoder.layers.1"
    levels = {
        f"{layer}.src_attn.linears.0.weight": "open",  # one of four squares
        f"{layer}.src_attn.linears.0.bias": "open",
        f"{layer}.feed_forward.w_1.weight": "certain",  # its bias is as long as d_ff
        f"{layer}.sublayer.0.norm.a_2": "likely",  # numbers in the order of use
        "src_embed.0.lut.weight": "certain",  # its rows are not those of the output
        "src_embed.1.pe": "certain",  # sinusoids
    }
    assert {name: suggestion.certainty[name] for name in levels} == levels
    (kernels,) = (
        q for q in suggest(recorded("kernels")[0]).questions if "orientation of Wq" in q.name
    )
    assert kernels.certainty == "likely"
    assert kernels.text(kernels.answers[0]) == "(inputs, outputs)"  # as its neighbours' biases say


# `benchmarks.porting --names` tries all kinds of names with every model.
RENAMED = [
    ("letters", "random"),
    ("keys_before_queries", "language"),
    ("fused_columns", "misleading"),
    ("sequence_first", "misleading"),
]


@pytest.mark.parametrize(("name", "kind"), tiered_rows(RENAMED, lambda name, _: name == "letters"))
def test_names_decide_nothing(name, kind):
    weights, record = renamed(name, kind)
    suggest(weights)  # is not refused
    check_found(name, weights, suggest(weights, record))


@pytest.mark.exhaustive
def test_rotary_positions_are_found():
    """Those of another program's cross-attention are none."""
    weights, record = recorded("rotary")
    suggestion = suggest(weights, record)
    assert suggestion.fits
    assert suggestion.config.positions == "rotary"


@pytest.mark.exhaustive
def test_what_no_word_explains_is_told_with_its_place_and_no_guess():
    weights, record = recorded("linear_bias")
    suggestion = suggest(weights, record)
    assert not suggestion.fits
    text = str(suggestion)
    assert "nothing fits at encoder.layers.0 in batch 1: the nearest model is" in text
    assert "single tokens agree and several do not" in text
    assert "rotary" not in text


def test_a_convolution_has_no_place():
    weights, record = recorded("convolution")
    with pytest.raises(InputError, match=r"convolution\.depthwise\.weight \[24, 1, 3\]: no place"):
        suggest(weights, record)


@pytest.mark.exhaustive
def test_the_nearest_miss_is_named():
    weights, record = recorded("clones")
    batches = tuple(
        batch._replace(blocks={}, output=1.3 * batch.output) for batch in record.batches
    )
    suggestion = suggest(weights, Record(batches, record.pad_id), minutes=0.05)
    assert not suggestion.fits
    assert suggestion.finding.stopped
    assert "nothing fits at logits in batch 0" in str(suggestion)
    assert "the search was stopped: give it more --minutes" in str(suggestion)


def test_a_record_of_another_model_is_refused():
    weights, _ = recorded("clones")
    _, record = recorded("letters")
    with pytest.raises(InputError, match="the record's logits have 67 entries"):
        suggest(weights, record)


def test_ten_thousand_random_names_are_refused():
    random = np.random.default_rng(0)
    letters = np.array(list("abcdefgh.0123_"))
    tensors = {
        "x" + "".join(random.choice(letters, 30)): np.broadcast_to(
            np.float32(0), random.integers(1, 2000, random.integers(0, 4))
        )
        for _ in range(10_000)
    }
    with pytest.raises(InputError, match="tensors are more than 5000"):
        suggest(tensors)
    few = dict(list(tensors.items())[:4000])
    with pytest.raises(InputError, match="found 0 stacks of layers among 4000 tensors"):
        suggest(few)


NAMES = st.lists(
    st.sampled_from(
        "encoder decoder layers 0 1 2 self_attn q k v o weight bias norm ff w b emb".split()
    ),
    min_size=1,
    max_size=6,
).map(".".join)
SHAPES = st.lists(st.sampled_from([1, 2, 4, 8]), max_size=3).map(tuple)


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None)
@given(shapes=st.dictionaries(NAMES, SHAPES, max_size=40))
def test_any_names_are_refused_in_one_line_or_placed(shapes):
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape) for name, shape in shapes.items()}
    assert is_refused_in_one_line(tensors) or suggest(tensors).certainty.keys() == tensors.keys()


def is_refused_in_one_line(tensors):
    """Any other exception than an InputError escapes, and fails the test."""
    try:
        suggest(tensors)
    except InputError as error:
        return "\n" not in str(error) and len(str(error)) < 2000
    return False


@pytest.mark.parametrize("change", ["drop", "rename", "reshape", "repeat"])
@pytest.mark.parametrize("seed", tiered(range(25), [0, 1]))
def test_a_damaged_model_is_refused_in_one_line_or_placed(change, seed):
    """Most random damage leaves a whole model around it: no error but an InputError escapes."""
    weights, _ = recorded("kernels" if seed % 2 else "wrapped")
    random, damaged = np.random.default_rng(seed), dict(weights)
    for name in random.choice(list(weights), random.integers(1, 4), replace=False):
        tensor = damaged.pop(name)
        if change == "rename":
            damaged[f"{name}.{random.integers(3)}"] = tensor
        elif change == "reshape":
            damaged[name] = np.zeros([*tensor.shape, 3][:: random.choice([1, -1])], np.float32)
        elif change == "repeat":
            damaged |= {name: tensor, f"{name}_2": tensor}
    refused = is_refused_in_one_line(damaged)
    assert refused or suggest(damaged).certainty.keys() == damaged.keys()
