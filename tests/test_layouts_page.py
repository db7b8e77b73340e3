"""docs/layouts.md says what the code does: the tree of parameters, and what has no place in it."""

import dataclasses
import re
from pathlib import Path

import pytest
from torch import nn

from jax_transformer import InputError, TransformerConfig, convert
from jax_transformer.convert import Layout, Row
from jax_transformer.convert.table import expand
from jax_transformer.model.tree import LAYER, PARAMETERS, parameter_shapes
from tests.models import small_config

PAGE = (Path(__file__).parents[1] / "docs" / "layouts.md").read_text("utf-8")
# Every axis another length, so that a length has one name.
LENGTHS = {"S": 37, "T": 41, "D": 42, "HK": 28, "GK": 14, "K": 7, "F": 53, "L": 29, "B": 10}
LENGTHS |= {"H": 4, "HV": 44, "GV": 22, "N": 3, "3M": 39, "3D": 126}
SIZES = {"src_vocab_size": 37, "tgt_vocab_size": 41, "d_model": 42, "num_heads": 4, "d_kv": 7}
SIZES |= {"num_kv_heads": 2, "d_v": 11}
SIZES |= {"d_ff": 53, "max_length": 29, "num_encoder_layers": 1, "num_decoder_layers": 1}


def all_shapes():
    """Return the shape of every parameter of any config, by path, in letters."""
    needs = [need for row in PARAMETERS.values() for need in row.needs.items()]
    fields = {name: True for name, values in needs if values == (True,)}
    fields |= {"norm_placement": "sandwich"}
    configs = [
        TransformerConfig(**SIZES | {"src_vocab_size": 41}, token_embeddings="shared"),
        TransformerConfig(**SIZES, **fields, positions="learned"),
        TransformerConfig(**SIZES, source_features=13),
    ]
    relative = {"positions": "relative", "relative_attention_num_buckets": 10}
    relative |= fields
    configs.append(TransformerConfig(**SIZES, **fields, decoder_attention="ssru_then_cross"))
    configs.append(TransformerConfig(**SIZES).with_head("sequence", labels=["a", "b", "c"]))
    configs += [
        TransformerConfig(**SIZES, **relative, relative_attention_bias=kind)
        for kind in ("shared", "per_layer")
    ]
    letters = {length: letter for letter, length in LENGTHS.items()}
    shapes = {}
    for config in configs:
        for path, shape in parameter_shapes(config).items():
            general = LAYER.sub("layers_{i}", path)
            shapes.setdefault(general, f"[{', '.join(letters[n] for n in shape)}]")
    return shapes


def tree():
    """Return the tree of parameters: a line for each module, with its leaves and its field."""
    shapes = all_shapes()
    usual = TransformerConfig(**SIZES)
    modules = {}
    for path in PARAMETERS:
        owner, _, leaf = path.rpartition("/")
        modules.setdefault(owner, []).append((leaf, shapes[path]))
    lines = {}
    for owner, leaves in modules.items():
        line = f"{owner:<58}" + "  ".join(f"{leaf} {shape}" for leaf, shape in sorted(leaves)[::-1])
        if needs := PARAMETERS[f"{owner}/{leaves[0][0]}"].missing_fields(usual):
            field, value = list(needs.items())[-1]
            line = f"{line:<86}{field}={value!r}"
        lines[line] = None
    return "\n".join(sorted(lines))


def test_the_tree_of_parameters_is_that_of_the_code():
    (shown,) = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown == tree(), f"print it into the page:\n{tree()}"


def config(**fields):
    return lambda: small_config("pre_norm", **fields)


def two_of_one_name():
    rows = [Row(path, path) for path in parameter_shapes(small_config("pre_norm"))]
    rows.append(Row("encoder/norm/scale", "decoder/norm/scale"))
    expand(Layout("x", tuple(rows)), small_config("pre_norm"))


def module(**parts):
    def build():
        holder = nn.Module()
        holder.transformer = nn.Transformer(12, 2, 1, 1, 14, batch_first=True)
        for name, part in parts.items():
            setattr(holder, name, part)
        convert.torch_nn_model(holder)

    return build


def differing(name, value):
    def build():
        body = nn.Transformer(12, 2, 1, 2, 14, batch_first=True)
        owner, _, attribute = name.rpartition(".")
        setattr(body.get_submodule(owner), attribute, value)
        convert.torch_nn_config(body)

    return build


WIDE = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 14), 1, enable_nested_tensor=False)
CLAIMS = {
    "ALiBi": config(positions="alibi"),
    "tables of another width": module(words=nn.Embedding(7, 6)),
    "a third table": module(a=nn.Embedding(7, 12), b=nn.Embedding(7, 12), c=nn.Embedding(2, 12)),
    "source's table that is tied to the head": config(output_projection="tied_to_source"),
    "convolutions": module(convolution=nn.Conv1d(12, 12, 3)),
    "recurrent layers": module(recurrent=nn.GRU(12, 12)),
    "adapters": module(words=nn.Embedding(7, 12), adapter=nn.Linear(12, 3)),
    "layers that share their weights": two_of_one_name,
    "heads": differing("decoder.layers.1.self_attn.num_heads", 3),
    "widths": differing("encoder", WIDE),
    "rates of dropout": differing("decoder.layers.1.dropout1.p", 0.3),
    "activation": differing("decoder.layers.1.activation", nn.functional.gelu),
    "epsilon": differing("encoder.norm.eps", 1e-3),
    "batch norm": config(norm="batch_norm"),
    "RMS norm with a bias": config(norm="rms_norm", norm_bias=True),
    "activations other than": config(activation="leaky_relu"),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_what_the_page_says_cannot_be_expressed_is_refused(claim):
    with pytest.raises(InputError):
        CLAIMS[claim]()


def test_what_the_page_names_is_on_the_page():
    section = PAGE.split("## What cannot be expressed")[1].split("\n## ")[0]
    text = " ".join(section.split())
    for claim in CLAIMS:
        assert claim in text, claim


def test_no_field_and_no_parameter_is_of_an_expert_or_a_segment():
    """A field that makes one of these claims wrong would have such a name."""
    names = [*(field.name for field in dataclasses.fields(TransformerConfig)), *PARAMETERS]
    for word in ("expert", "segment", "alibi", "adapter"):
        assert not any(word in name for name in names), word


def test_the_part_of_a_file_that_the_page_shows_can_be_read(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.toml").write_text(shown, "utf-8")
    layout, read = convert.read_layout(tmp_path / "mine.toml")
    assert [row.stack for row in layout.rows] == ["heads", "rows"]
    assert read == TransformerConfig.preset("pre_norm", num_heads=4)
