"""Comparison with a user's program: what agrees, which block differs first, which masks fit."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer import convert, porting
from jax_transformer.convert.buffers import FixedBuffer
from jax_transformer.convert.layouts import torch_nn
from jax_transformer.convert.table import Buffer, flatten, nest
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import BlockError, Comparison, compare_record
from jax_transformer.porting.places import foreign_modules
from jax_transformer.porting.record import Batch, Record, record_module
from tests.convert.foreign import MODELS, randomized
from tests.convert.tools import target_masks
from tests.models import random_params, random_tokens, small_config
from tests.parity.ladder import ROUNDED
from tests.porting.wrong_variants import LAYOUT, WRONG, mistaken, program, ragged, right_config
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")  # sequence first
SMALL = {"num_encoder_layers": 2, "num_decoder_layers": 2}


def masked(config):
    """Return the call of a module that takes boolean masks of ids."""
    return lambda module, src, tgt: module(
        src, tgt, *target_masks(src.numpy(), tgt.numpy(), config.pad_id)
    )


@pytest.mark.parametrize("name", tiered(MODELS, ["pre_norm_log_softmax"]))
def test_every_block_of_a_foreign_model_agrees(name):
    config = small_config(name, **SMALL)
    module = randomized(MODELS[name](config))
    params = convert.from_torch(module.state_dict(), config, name)
    src, tgt = random_tokens(config)
    result = porting.compare(module, params, config, name, src, tgt, call=masked(config))
    print(result)
    assert result.first_differing is None
    assert result.output == "logits"
    # This encoder takes no padding mask, whatever it is called with.
    assert result.masks == ("no source padding mask" if name == "shared_heads" else "default")
    names = [block.name for block in result.blocks]
    expected = {"source_embedding", "encoder.layers.1", "decoder.layers.0.cross_attention"}
    assert expected <= {*names}
    assert ("target_positions" in names) == (name != LAYOUT)  # whose table is no module's
    layer = [name.removeprefix("decoder.layers.1.") for name in names]
    order = ["self_attention", "cross_attention", "feed_forward"]
    assert [part for part in layer if part in order] == order
    assert names[-1] == "logits"
    assert all(block.foreign for block in result.blocks[:-1])
    assert max(block.error for block in result.blocks) <= ROUNDED
    assert str(result).endswith("agrees with your program: the bound is 1e-05")


@pytest.fixture(scope="module")
def right():
    """The right model's program, its inputs, its state_dict and what it computed."""
    module, (src, tgt) = program(), ragged(right_config())
    record = record_module(module, src, tgt, pad_id=right_config().pad_id)
    return module, src, tgt, module.state_dict(), record


@pytest.mark.parametrize("name", tiered(WRONG, ["query and value"]))
def test_a_wrong_variant_is_caught_and_named(name, right):
    """None of them differs in a name or a shape."""
    module, src, tgt, state_dict, record = right
    tensors, config = mistaken(name, state_dict)
    params = convert.from_torch(tensors, config, LAYOUT)
    result = porting.compare(module, params, config, LAYOUT, src, tgt)
    assert result.first_differing.name == WRONG[name].block, result
    assert result.blocks[-1].error > result.bound
    assert [WRONG[name].cause in text for text in result.explanations] == [True]
    layout = convert.get_layout(LAYOUT)
    recorded = compare_record(params, config, layout, record, explain=False)
    assert recorded == dataclasses.replace(result, explanations=())


FIELDS = [name for name, variant in WRONG.items() if variant.fields]
SETS = [names for count in (2, 3) for names in itertools.combinations(FIELDS, count)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", SETS)
def test_fields_that_are_wrong_at_once_are_named_together(names, right):
    """Several are wrong in the first layer, so that no single change makes it agree."""
    module, src, tgt, state_dict, _ = right
    fields = {field: value for name in names for field, value in WRONG[name].fields.items()}
    config = dataclasses.replace(right_config(), **fields)
    params = convert.from_torch(state_dict, config, LAYOUT)
    found = porting.compare(module, params, config, LAYOUT, src, tgt).explanations
    assert len(found) == len(names)
    assert all(any(WRONG[name].cause in text for text in found) for name in names), found
    assert found[-1].partition(": ")[2].startswith("the model agrees within")


@pytest.mark.parametrize("damage", tiered([0.001, 1.0], [1.0]))
def test_damaged_weights_have_no_explanation(damage, right):
    """The right activation comes nearer, and is not named, because it gets nowhere."""
    module, src, tgt, state_dict, _ = right
    config = dataclasses.replace(right_config(), **WRONG["activation"].fields)
    params = flatten(convert.from_torch(state_dict, config, LAYOUT))
    path = "encoder/layers_0/feed_forward/inner/kernel"
    params[path] += damage * np.random.default_rng(0).normal(size=params[path].shape)
    result = porting.compare(module, nest(params), config, LAYOUT, src, tgt)
    assert result.first_differing.name == "encoder.layers.0.feed_forward"
    assert result.explanations == ()


def test_without_torch_a_difference_is_marked_and_the_remedy_named(right, monkeypatch):
    _, _, _, state_dict, record = right
    layout = convert.get_layout(LAYOUT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    params = convert.from_torch(state_dict, right_config(), LAYOUT)
    agreeing = compare_record(params, right_config(), layout, record)
    assert agreeing.explanations == ()
    assert "note: only with torch can it be told" in str(agreeing)
    tensors, config = mistaken("epsilon", state_dict)
    params = convert.from_torch(tensors, config, LAYOUT)
    differing = compare_record(params, config, layout, record)
    assert differing.explanations == ("looked for by torch; install jax-transformer[torch]",)
    assert f"explanation: {differing.explanations[0]}" in str(differing)
    marked = [line for line in str(differing).splitlines() if "first to differ" in line]
    names = [WRONG["epsilon"].block, "encoder.layers.0.norm1"]
    assert [line.split()[:2] for line in marked] == [names]
    assert str(differing).endswith("differs from your program: the bound is 1e-05")


@pytest.mark.exhaustive
def test_the_block_of_every_changed_parameter_is_the_first_to_differ(right):
    """One parameter of each place is changed by a hundredth, and no other place is blamed."""
    _, _, _, state_dict, record = right
    layout, config = convert.get_layout(LAYOUT), right_config()
    params = flatten(convert.from_torch(state_dict, config, LAYOUT))
    chosen = [path for path in params if path.endswith(("value/kernel", "outer/bias", "scale"))]
    chosen += ["source_embedding/embedding", "target_embedding/embedding"]
    random = np.random.default_rng(0)
    for path in chosen:
        changed = params[path] + 0.01 * random.normal(size=params[path].shape).astype(np.float32)
        changed = nest(params | {path: changed})
        result = compare_record(changed, config, layout, record, explain=False)
        place = re.sub("/(value/kernel|outer/bias|scale|embedding)$", "", path)
        expected = place.replace("layers_", "layers.").replace("/", ".")
        assert result.first_differing.name == expected
    assert len(chosen) == 2 * 4 + 7 + 2


class Program(nn.Module):
    """nn.Transformer between embeddings and a head, with masks as the flags say."""

    def __init__(self, config, output=None, encoder=True, memory=True, causal=True, hidden=False):
        super().__init__()
        self.hidden = hidden
        self.pad_id, self.output = config.pad_id, output
        self.encoder, self.memory, self.causal = encoder, memory, causal
        self.source = nn.Embedding(config.src_vocab_size, config.d_model)
        self.target = nn.Embedding(config.tgt_vocab_size, config.d_model)
        first = config.norm_placement == "pre"
        self.body = nn.Transformer(
            config.d_model, config.num_heads, 1, 1, config.d_ff, 0.1, norm_first=first
        )
        self.head = nn.Linear(config.d_model, config.tgt_vocab_size)

    def forward(self, src, tgt):
        """The sequence comes first inside, and in what it returns."""
        padding, length = src == self.pad_id, tgt.shape[1]
        logits = self.head(
            self.body(
                self.source(src).transpose(0, 1),
                self.target(tgt).transpose(0, 1),
                tgt_mask=torch.ones(length, length).triu(1).bool() if self.causal else None,
                src_key_padding_mask=padding if self.encoder else None,
                tgt_key_padding_mask=(tgt == self.pad_id) if self.hidden else None,
                memory_key_padding_mask=padding if self.memory else None,
            )
        )
        return self.output(logits) if self.output else logits


PROGRAM = small_config(
    "torch_nn",
    num_encoder_layers=1,
    num_decoder_layers=1,
    token_embeddings="separate",
    output_projection="linear",
    output_bias=True,
)
PROGRAM_LAYOUT = convert.Layout(
    "torch_nn",
    (
        *torch_nn.transformer("body.").rows,
        convert.Row("source.weight", "source_embedding/embedding"),
        convert.Row("target.weight", "target_embedding/embedding"),
        *torch_nn.linear("head", "output_projection"),
    ),
)


def compared(config=PROGRAM, **options):
    """Return the comparison of a `Program` with a config of its weights."""
    module = randomized(Program(PROGRAM, **options))
    params = convert.from_torch(module.state_dict(), config, PROGRAM_LAYOUT)
    return porting.compare(module, params, config, PROGRAM_LAYOUT, *ragged(PROGRAM), explain=False)


MASKS = {
    "default": {},
    "no source padding mask in the cross-attention": {"memory": False},
    "no source padding mask in the encoder": {"encoder": False},
    "no source padding mask": {"encoder": False, "memory": False},
    "not causal": {"causal": False, "hidden": True},
    "no target padding mask, not causal": {"causal": False},
    "no source padding mask, no target padding mask, not causal": dict.fromkeys(
        ("encoder", "memory", "causal"), False
    ),
}


@pytest.mark.parametrize("masks", MASKS)
def test_the_masks_of_a_program_are_recognised(masks):
    """nn.Transformer, sequence first, whose feed-forward networks are no modules of their own."""
    result = compared(**MASKS[masks])
    print(result)
    assert result.masks == masks
    assert result.first_differing is None
    modules = {block.name: block.foreign for block in result.blocks}
    assert modules["encoder.layers.0.feed_forward"] == "body.encoder.layers.0.linear2"
    assert modules["decoder.layers.0.cross_attention"] == "body.decoder.layers.0.multihead_attn"
    assert modules["decoder"] == "body.decoder"
    assert (masks in str(result)) == (masks != "default")
    assert result.blocks[-1].error < 2e-6


def test_what_is_wrong_beside_the_masks_is_blamed_alone():
    """The masks that reproduce the most blocks are kept, though nothing fits."""
    module = randomized(Program(PROGRAM, causal=False))
    wrong = module.state_dict() | {
        "body.decoder.layers.0.linear2.bias": torch.ones(PROGRAM.d_model)
    }
    params = convert.from_torch(wrong, PROGRAM, PROGRAM_LAYOUT)
    inputs = (PROGRAM, PROGRAM_LAYOUT, *ragged(PROGRAM))
    result = porting.compare(module, params, *inputs, explain=False)
    assert result.first_differing.name == "decoder.layers.0.feed_forward"
    assert result.masks == "no target padding mask, not causal"


def test_a_notebook_shows_the_blocks_as_a_table_and_one_line_elsewhere():
    first = BlockError("encoder", "<mine>", 1e-15)
    same = Comparison((first, BlockError("logits", "", 1e-15)), 1e-11)
    assert repr(same) == "Comparison(2 blocks; agrees with your program: the bound is 1e-11)"
    assert "&lt;mine&gt;" in same._repr_html_()
    other = repr(dataclasses.replace(same, bound=1e-16))
    assert "differs from your program" in other
    assert other.endswith(", first in encoder)")


def test_a_module_is_the_last_place_in_it():
    """The module around both stacks gives what the decoder gives, and not what the encoder does."""
    order = ["encoder", "decoder.norm", "decoder", "output_projection"]
    found = foreign_modules(PROGRAM_LAYOUT, PROGRAM, order, {"body", "head"})
    assert found == {"decoder": ["body"], "output_projection": ["head"]}


def test_a_mask_in_a_layer_is_no_place():
    mask = FixedBuffer("triangle", (2, 2), "bool", (True, False))
    layout = dataclasses.replace(
        PROGRAM_LAYOUT, buffers=(Buffer("body.decoder.layers.0.seen", mask),)
    )
    place, module = "decoder.layers.0", "body.decoder.layers.0"
    assert foreign_modules(layout, PROGRAM, [place], {module}) == {place: [module]}


@pytest.mark.parametrize("kind", tiered(["log_softmax", "softmax"], ["softmax"]))
def test_the_kind_of_output_is_recognised(kind):
    result = compared(output=lambda logits: getattr(logits, kind)(-1))
    assert result.output == kind
    assert result.first_differing is None
    assert f"the program returns {kind} of the logits" in str(result)
    wrong = dataclasses.replace(PROGRAM, norm_epsilon=2e-4)
    result = compared(wrong, output=lambda logits: getattr(logits, kind)(-1))
    assert result.output == kind
    assert result.blocks[-1].error > 10 * result.bound


def test_another_pad_id_is_recognised():
    module = randomized(Program(PROGRAM))
    params = convert.from_torch(module.state_dict(), PROGRAM, PROGRAM_LAYOUT)
    src, tgt = np.full((2, 7), 5), np.full((2, 5), 6)
    src[:, 0], tgt[:, 0], src[1, 3:] = 7, 8, PROGRAM.pad_id
    record = record_module(module, src, tgt, pad_id=PROGRAM.pad_id)
    other = dataclasses.replace(PROGRAM, pad_id=7)
    result = compare_record(params, other, PROGRAM_LAYOUT, record)
    assert result.masks == "pad_id=0"
    assert result.first_differing is None


def test_padding_that_nobody_declared_is_recognised_by_what_ends_the_rows():
    """torch_nn_model takes the id that it is given; the data have another one."""
    module = randomized(Program(PROGRAM))
    params = convert.from_torch(module.state_dict(), PROGRAM, PROGRAM_LAYOUT)
    src, tgt = np.full((2, 7), 5), np.full((2, 5), 6)
    src[1, 3:] = PROGRAM.pad_id
    other = dataclasses.replace(PROGRAM, pad_id=7)
    result = porting.compare(module, params, other, PROGRAM_LAYOUT, src, tgt)
    assert result.masks == "pad_id=0"
    assert "than the config and the layout say: pad_id=0" in str(result)


@pytest.mark.exhaustive
def test_vectors_and_float64(x64):
    """A bare nn.Transformer reads vectors and returns hidden states; its own bound is small."""
    config = small_config("torch_nn", num_encoder_layers=1, num_decoder_layers=1)
    module = randomized(convert.torch_nn_module(config)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)  # no float32 number
    params = convert.from_torch(module.state_dict(), config, "torch_nn")
    inputs = (config, "torch_nn", *random_tokens(config, dtype=np.float64))
    result = porting.compare(module, params, *inputs)
    assert result.bound == 1e-11
    assert result.masks == "not causal"
    assert result.first_differing is None
    # Weights that were rounded: no config comes nearer, so this is no difference.
    narrow = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    result = porting.compare(module, narrow, *inputs)
    assert (result.bound, result.first_differing) == (5e-7, None)
    assert 1e-9 < result.blocks[-1].error < 1e-6
    assert porting.compare(module, narrow, *inputs, explain=False).first_differing


@pytest.mark.parametrize("placement", tiered(["post", "pre"], ["post"]))
def test_a_sublayer_may_hold_the_addition(placement):
    """Where the model agrees, a module that computes something else is left out."""
    config = dataclasses.replace(PROGRAM, norm_placement=placement)
    module = randomized(Program(config))
    params = convert.from_torch(module.state_dict(), config, PROGRAM_LAYOUT)
    record = record_module(module, *ragged(PROGRAM), pad_id=config.pad_id)
    (batch,) = record.batches
    own, name = "encoder.layers.0.self_attention", "body.encoder.layers.0.self_attn"
    attended = batch.blocks[name]
    for weight, compared in ((1, True), (1.01, False)):
        batch.blocks[name] = batch.blocks["source"] + weight * attended
        result = compare_record(params, config, PROGRAM_LAYOUT, record)
        assert result.first_differing is None
        assert (own in [block.name for block in result.blocks]) == compared


def record_of(**changed):
    """Return a record of one batch for `PROGRAM`, with parts changed."""
    batch = Batch(np.full((2, 7), 5), np.full((2, 5), 6), np.ones((2, 5, 41)), {})
    return Record((batch._replace(**changed),), 0)


REFUSED = {
    "source": ({"src": np.full((2, 7), 37)}, PROGRAM_LAYOUT, "src\\[0, 0\\]=37 is outside"),
    "target": ({"tgt": np.full((2, 5), 41)}, PROGRAM_LAYOUT, "tgt\\[0, 0\\]=41 is outside"),
    "vectors": ({"src": np.ones((2, 7, 42))}, PROGRAM_LAYOUT, "must hold whole numbers"),
    "width": ({"output": np.ones((2, 5, 9))}, PROGRAM_LAYOUT, "9 numbers .* tgt_vocab_size=41"),
    "padding": ({"src": np.zeros((2, 7), int)}, PROGRAM_LAYOUT, "no row with a source and"),
    "part": ({}, torch_nn.part("encoder"), "is of encoder, not of a whole model"),
    "layout": ({}, convert.get_layout("torch_nn"), "has no row for"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused(case):
    changed, layout, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        compare_record(random_params(PROGRAM), PROGRAM, layout, record_of(**changed))
    assert "\n" not in str(caught.value)
