"""A module around torch.nn.Transformer: what is found in it, what it computes, what is refused."""

import functools
import math

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer import InputError, TransformerConfig, apply, convert
from jax_transformer.convert.layouts.torch_nn_model import SINUSOIDS
from jax_transformer.model.functional import sinusoidal_positions
from tests.convert.foreign import randomized
from tests.convert.tools import assert_same_tensors
from tests.parity.ladder import error

WIDTH, SOURCE, TARGET, LONGEST = 12, 17, 19, 11
Body = functools.partial(nn.Transformer, WIDTH, 2, 2, 1, 14, batch_first=True)


def table(kind, *axes, length=LONGEST):
    return torch.tensor(sinusoidal_positions(length, WIDTH, kind)).float().reshape(*axes, WIDTH)


class Model(nn.Module):
    """What the modules of this file share: a forward function over `embed` and the output."""

    scale, output = math.sqrt(WIDTH), "head"

    def forward(self, src, tgt):
        hidden = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        body = next(part for part in self.modules() if isinstance(part, nn.Transformer))
        x = body(self.embed(src, 0), self.embed(tgt, 1), tgt_mask=hidden)
        return getattr(self, self.output)(x) if self.output else x


class Positions(nn.Module):
    """A buffer of sinusoids for a model whose batch is the second axis."""

    def __init__(self):
        super().__init__()
        self.register_buffer("pe", table("sinusoidal", LONGEST, 1))


class Tutorial(Model):
    """Two tables, one buffer, a head."""

    output = "generator"

    def __init__(self):
        super().__init__()
        self.transformer = Body()
        self.generator = nn.Linear(WIDTH, TARGET)
        self.tgt_tok_emb = nn.Embedding(TARGET, WIDTH)
        self.src_tok_emb = nn.Embedding(SOURCE, WIDTH)
        self.positional_encoding = Positions()

    def embed(self, ids, side):
        tokens = (self.src_tok_emb, self.tgt_tok_emb)[side](ids)
        return tokens * self.scale + self.positional_encoding.pe[: ids.shape[1], 0]


class Tied(Model):
    """One table for both sides and the head, learned positions, vectors that are not scaled."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(TARGET, WIDTH, padding_idx=3)
        self.decoder_position = nn.Embedding(LONGEST, WIDTH)
        self.encoder_position = nn.Embedding(LONGEST, WIDTH)
        self.inner = nn.ModuleDict({"body": Body(norm_first=True)})
        self.head = nn.Linear(WIDTH, TARGET, bias=False)
        self.head.weight = self.words.weight

    def embed(self, ids, side):
        places = (self.encoder_position, self.decoder_position)[side]
        return self.words(ids) + places.weight[: ids.shape[1]]


class OneTable(Tied):
    """One table of positions for both sides, under two names."""

    def __init__(self):
        super().__init__()
        self.encoder_position = self.decoder_position


class Nameless(Model):
    """Names that say nothing; the head, tied with a bias, tells the target's table."""

    output = "d"

    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(TARGET, WIDTH)
        self.b = nn.Embedding(SOURCE, WIDTH)
        self.c = Body(activation="gelu")
        self.d = nn.Linear(WIDTH, TARGET)
        self.d.weight = self.a.weight
        self.register_buffer("e", table("sinusoidal_halves", LONGEST))
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

    def embed(self, ids, side):
        return (self.b, self.a)[side](ids) * self.scale + self.e[: ids.shape[1]]


class Bare(Model):
    """Parameters for positions, stacks under second names, a decoder without a final norm."""

    output = None

    def __init__(self):
        super().__init__()
        self.transformer = Body()
        self.transformer.decoder.norm = None
        self.encoder = self.transformer.encoder
        self.src = nn.Embedding(TARGET, WIDTH)
        self.tgt = self.src
        self.source_pos = nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        self.target_pos = nn.Parameter(torch.randn(LONGEST, 1, WIDTH))

    def embed(self, ids, side):
        places = (self.source_pos[0], self.target_pos[:, 0])[side]
        return self.src(ids) * self.scale + places[: ids.shape[1]]


class Computed(Model):
    """A table that is no buffer of the state_dict, and is in half precision."""

    def __init__(self):
        super().__init__()
        self.encoder_words = nn.Embedding(SOURCE, WIDTH)
        self.decoder_words = nn.Embedding(TARGET, WIDTH)
        self.table = table("sinusoidal_per_column", 1, LONGEST).bfloat16()
        self.transformer = Body()
        self.head = nn.Linear(WIDTH, TARGET)

    def embed(self, ids, side):
        tokens = (self.encoder_words, self.decoder_words)[side](ids)
        return tokens * self.scale + table("sinusoidal_per_column", LONGEST)[: ids.shape[1]]


SEPARATE, SHARED = {"token_embeddings": "separate"}, {"token_embeddings": "shared"}
LEARNED = {"positions": "learned"}
# Of each module: the fields that it does not tell, and some that it tells.
MODULES = {
    Tutorial: ({"pad_id": 0}, SEPARATE | {"positions": "sinusoidal"}),
    Tied: (
        {"embedding_scale": "none", "pad_id": 3},
        SHARED | LEARNED | {"output_projection": "tied"},
    ),
    OneTable: ({"embedding_scale": "none", "pad_id": 3}, SHARED | LEARNED),
    Nameless: (
        {"pad_id": 0},
        {"positions": "sinusoidal_halves", "output_projection": "tied", "output_bias": True},
    ),
    Bare: (
        {"embedding_scale": "sqrt_d_model", "pad_id": 0},
        SHARED | LEARNED | {"decoder_final_norm": False, "output_projection": "none"},
    ),
    Computed: ({"pad_id": 0}, SEPARATE | {"positions": "sinusoidal_per_column"}),
}


@pytest.mark.parametrize(("kind", "untold", "found"), [(k, *v) for k, v in MODULES.items()])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_module_is_found_out_computed_and_handed_back(kind, untold, found):
    module = randomized(kind()).eval()
    config, layout = convert.torch_nn_model(module, **untold)
    fields = untold | found
    assert {name: getattr(config, name) for name in fields} == fields
    assert (config.max_length, config.tgt_vocab_size) == (LONGEST, TARGET)
    state_dict = module.state_dict()
    params = convert.from_torch(state_dict, config, layout)
    back = convert.to_torch(params, config, layout)
    other = kind()
    other.load_state_dict(back, strict=True)
    for name, buffer in module.named_buffers():  # computed anew, in float64
        if name in back and buffer.is_floating_point():
            back[name] = buffer
    assert_same_tensors(back, state_dict)

    random = np.random.default_rng(0)
    src = random.integers(4, config.src_vocab_size, (2, 7), np.int32)
    tgt = random.integers(4, config.tgt_vocab_size, (2, 5), np.int32)
    with torch.no_grad():
        theirs = module(torch.from_numpy(src), torch.from_numpy(tgt))
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(apply, static_argnums=1)(params, config, src, tgt)
    assert error(ours, theirs) <= 1e-5


def test_what_is_found_in_the_tutorial_is_complete_and_goes_into_a_file(tmp_path):
    config, layout = convert.torch_nn_model(Tutorial(), pad_id=0)
    assert layout.name == "Tutorial"
    assert [buffer.foreign for buffer in layout.buffers] == ["positional_encoding.pe"]
    assert layout.buffers[0].value == convert.PositionTable(("length", 1, "d_model"), LONGEST)
    fields = {"num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 1, "d_ff": 14}
    fields |= {"d_model": WIDTH, "src_vocab_size": SOURCE, "tgt_vocab_size": TARGET}
    fields |= {"positions": "sinusoidal", "max_length": LONGEST, "token_embeddings": "separate"}
    fields |= {"output_projection": "linear", "output_bias": True, "embedding_dropout": "both"}
    fields |= {"attention_dropout": 0.1, "activation_dropout": 0.1}
    fields |= {"embedding_scale": "sqrt_d_model"}
    assert config == TransformerConfig.preset("torch_nn", **fields)
    convert.write_layout(tmp_path / "mine.toml", layout, config)
    assert convert.read_layout(tmp_path / "mine.toml") == (layout, config)


@pytest.mark.parametrize("kind", SINUSOIDS)
def test_each_kind_of_sinusoids_is_known_by_its_values(kind):
    module = Tutorial()
    module.positional_encoding.pe = table(kind, LONGEST, 1)
    assert convert.torch_nn_model(module, pad_id=0).config.positions == kind


def embedding(rows, width=WIDTH):
    return nn.Embedding(rows, width)


def test_what_the_model_cannot_have_is_refused_by_name():
    refused = {
        r"must hold one torch.nn.Transformer, but holds 2: transformer, second": {"second": Body()},
        r"must hold one torch.nn.Transformer, but holds 0: none; `jax-transformer suggest` reads": {
            "transformer": nn.Linear(3, 3)
        },
        r"adapter.weight \[5, 12\] of a Linear has no place": {"adapter": nn.Linear(WIDTH, 5)},
        r"norm.weight \[12\] of a LayerNorm has no place": {"norm": nn.LayerNorm(WIDTH)},
        r"emb.weight has vectors of width 6, but .* d_model=12": {
            "src_tok_emb": embedding(SOURCE, 6)
        },
        r"pos_1.weight, pos_2.weight, pos_3.weight: 3 learned tables of positions": {
            f"pos_{number}": embedding(LONGEST) for number in (1, 2, 3)
        },
        r"src_pos.weight has 5 positions and tgt_pos.weight has 11; .* max_length": {
            "src_pos": embedding(5),
            "tgt_pos": embedding(LONGEST),
        },
        r"has 'sinusoidal' positions beside the learned ones of src_pos.weight": {
            "src_pos": embedding(LONGEST),
            "tgt_pos": embedding(LONGEST),
        },
        r"pos_3 \[1, 11, 12\] holds positions of another kind": {
            "pos_3": torch.randn(1, LONGEST, WIDTH)
        },
        r"pos_2 holds 'sinusoidal_halves'.*; the model has one kind of positions": {
            "pos_2": table("sinusoidal_halves", LONGEST)
        },
        r"third.weight are 3 tables of tokens; the model has two at most": {"third": embedding(4)},
        r"generator.weight has 17 outputs, but .* tgt_tok_emb.weight has 19 tokens": {
            "generator": nn.Linear(WIDTH, SOURCE)
        },
        r"generator.weight, second_head.weight could each be the output": {
            "second_head": nn.Linear(WIDTH, TARGET)
        },
    }
    for message, parts in refused.items():
        module = Tutorial()
        for name, part in parts.items():
            setattr(module, name, part)
        with pytest.raises(InputError, match=message) as refusal:
            convert.torch_nn_model(module)
        assert "\n" not in str(refusal.value)
    module = Tutorial()
    module.generator = nn.Linear(WIDTH, SOURCE)
    module.generator.weight = module.src_tok_emb.weight
    with pytest.raises(InputError, match="of the source is tied to the head, not the target's"):
        convert.torch_nn_model(module)


def test_a_field_that_contradicts_the_module_is_refused():
    for name, value, message in (
        ("num_heads", 3, "num_heads=3, but the module has 2"),
        ("token_embeddings", "shared", "'shared', but the module has 'separate'"),
        ("positions", "sinusoidal_halves", "'sinusoidal_halves', but the module has 's"),
        ("positions", "rotary", "positions='rotary', but the module has 'sinusoidal'"),
        ("positions", "alibi", "positions='alibi' must be one of 'learned'"),
        ("heads", 3, "heads=3 is not a setting"),
    ):
        with pytest.raises(InputError, match=message):
            convert.torch_nn_model(Tutorial(), **{name: value})


def test_ids_that_nothing_tells_are_asked_for():
    message = r"no table of Tutorial has padding_idx: .* torch_nn_model\(module, pad_id=0\)"
    with pytest.raises(InputError, match=message):
        convert.torch_nn_model(Tutorial())
    module = Tutorial()
    module.tgt_tok_emb.padding_idx = 1
    for fields in ({}, {"pad_id": 1}):
        with pytest.raises(InputError, match=r"pad_id=1 is also .* bos_id=2, eos_id=3"):
            convert.torch_nn_model(module, **fields)
    config, _ = convert.torch_nn_model(module, bos_id=2, eos_id=3)
    assert (config.pad_id, config.bos_id, config.eos_id) == (1, 2, 3)


def foreign_of(layout, path):
    return [row.foreign for row in layout.rows if row.paths == (path,)]


def test_two_tables_of_one_size_are_told_apart_by_the_tied_head():
    for name, other in (("a", "b"), ("b", "a")):
        module = Nameless()
        module.a, module.b = nn.Embedding(TARGET, WIDTH), nn.Embedding(TARGET, WIDTH)
        module.d.weight = getattr(module, name).weight
        layout = convert.torch_nn_model(module, pad_id=0).layout
        assert foreign_of(layout, "target_embedding/embedding") == [f"{name}.weight", "d.weight"]
        assert foreign_of(layout, "source_embedding/embedding") == [f"{other}.weight"]


def test_tables_of_positions_are_told_apart_by_their_names():
    module = nn.Module()
    module.transformer = Body()
    module.tgt_positional_encoding = nn.Embedding(LONGEST, WIDTH)
    module.src_positional_encoding = nn.Embedding(LONGEST, WIDTH)
    config, layout = convert.torch_nn_model(module)
    assert (config.positions, config.token_embeddings) == ("learned", "none")
    names = foreign_of(layout, "source_positions/embedding")
    assert names == ["src_positional_encoding.weight"]


def test_what_forward_does_is_taken_from_the_caller():
    fields = {"embedding_scale": "none", "pad_id": 5, "positions": "none", "max_length": 9}
    module = Tutorial()
    config, layout = convert.torch_nn_model(module, **fields)
    assert {name: getattr(config, name) for name in fields} == fields
    params = convert.from_torch(module.state_dict(), config, layout)
    module.load_state_dict(convert.to_torch(params, config, layout), strict=True)
    with pytest.raises(InputError, match="max_length=9, but the module has 11"):
        convert.torch_nn_model(Tied(), max_length=9)
    with pytest.raises(InputError, match=r"a dict is no torch.nn.Module"):
        convert.torch_nn_model({})
