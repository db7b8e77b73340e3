"""Programs that nobody described are found with every tensor, or refused by what they do."""

import dataclasses
import functools
import linecache
import re
from pathlib import Path

import numpy as np
import pytest

from jax_transformer import convert
from jax_transformer.porting import suggest
from tests.convert.foreign import randomized
from tests.porting import public_models
from tests.porting.foreign_models import MODELS
from tests.porting.public_models import PAD, SHAPES, USUAL, VOCABULARIES
from tests.porting.recorded import SHORT, check_home, record, tensors_of
from tests.tiers import tiered

FOLDER = Path(public_models.__file__).parent
PLACE = re.compile(r"\w+ \((\w+\.py):(\d+)\)")
FLOATS = (
    "ids.append(rows.to(device))",
    "ids.append(rows if ids else torch.randn(ROWS, length, 11))",
)
SHORTER = "[(7, 5)]"
FAR = dict.fromkeys(("windows", "far_window", "buckets"), "[(17, 13), (150, 141)]")


@functools.cache
def read(name, lengths=None):
    """Return what a program of `SHAPES` holds, and what is read of it."""
    shape = SHAPES[name]
    module = randomized(shape.build()).eval()
    changes = [FLOATS] if name == "features" else []
    lengths = lengths or FAR.get(name, SHORT)
    recording = record(module, PAD, VOCABULARIES, lengths=lengths, changes=changes)
    tensors = {n: x for n, x in tensors_of(module).items() if n not in shape.dropped}
    return tensors, suggest(tensors, recording)


SOME_MODELS = ("fused_rows", "clones", "kernels", "sequence_first")


def check_found(tensors, suggestion, fields):
    assert suggestion.fits, suggestion
    check_home(tensors, suggestion)
    assert {name: getattr(suggestion.config, name) for name in fields} == dict(fields)
    assert max(suggestion.errors.values()) < 1e-12


@pytest.mark.parametrize("name", tiered(MODELS, ["fused_heads", "wrapped"], SOME_MODELS))
def test_a_program_of_a_stranger_is_found(name, tmp_path):
    model = MODELS[name]
    module, fields = model.module(), model.expected
    sizes = fields["src_vocab_size"], fields["tgt_vocab_size"]
    tensors = tensors_of(module)
    suggestion = suggest(tensors, record(module, fields["pad_id"], sizes))
    check_found(tensors, suggestion, fields)
    masks = suggestion.layout.masks
    assert masks[:2] == (model.hides,) * 2
    assert masks.causal
    convert.write_layout(tmp_path / "mine.toml", suggestion.layout, suggestion.config)
    assert convert.read_layout(tmp_path / "mine.toml") == (suggestion.layout, suggestion.config)


QUICK = ["modern", "buffers", "one_norm_of_attentions", "buckets", "one_attention", "rezero"]
QUICK += ["far_window", "features"]
# Of the rest CI runs those that are found or refused in a way of their own; the sweep has all.
SOME = ["zeroed_rows", "einsum_kernels", "padded_inside", "log_softmax", "logit_cap", "score_cap"]
SOME += ["rotary_pairs", "view_of_heads", "softmax_of_queries", "deep_residual", "wide_values"]
SOME += ["side_by_side", "layer_memory", "normed_queries", "shifted_inside", "unbiased_variance"]


@pytest.mark.parametrize("name", tiered(SHAPES, QUICK, SOME))
def test_a_shape_of_public_code_is_found_or_refused_by_its_place(name):
    refused, (tensors, suggestion) = SHAPES[name].refused, read(name)
    if refused is None:
        check_found(tensors, suggestion, USUAL | dict(SHAPES[name].fields))
        return
    assert not suggestion.fits
    assert suggestion.only_masks == (suggestion.layout is not None) == (name == "far_window")
    (text,) = [text for text in suggestion.refused if refused.text in text][:1]
    lines = [linecache.getline(str(FOLDER / file), int(line)) for file, line in PLACE.findall(text)]
    assert any(refused.line in line for line in lines) if refused.line else not lines, text
    assert not refused.module or re.search(rf" in (.*, )?{refused.module}(,|$)", text), text


@pytest.mark.parametrize("name", ["far_window", "buckets"])
def test_what_short_runs_cannot_tell_is_noted(name):
    _, suggestion = read(name, SHORTER)
    assert suggestion.fits
    assert suggestion.config.sliding_window is None
    assert "up to 7 source and 5 target tokens were seen" in " ".join(suggestion.notes)
    if name == "buckets":
        assert suggestion.config.relative_attention_max_distance == 128
        told = re.search(r"128 is taken, and (\d+) to (\d+) give", " ".join(suggestion.notes))
        assert int(told[1]) <= 20 < 128 <= int(told[2])


def test_names_decide_nothing():
    """Each part of each name is another word; numbers, which count layers, stay."""
    module = MODELS["wrapped"].module()
    recording, tensors = record(module, 0, (35, 49)), tensors_of(module)
    random, words = np.random.default_rng(0), {}

    def renamed(name):
        for part in re.findall(r"[^\W\d][a-z_]*", name):
            words.setdefault(part, "".join(random.choice([*"abcdefghijk"], 9)))
        return re.sub(r"[^\W\d][a-z_]*", lambda found: words[found[0]], name)

    usual = suggest(tensors, recording)
    runs = tuple(
        dataclasses.replace(
            run,
            leaves=tuple(x._replace(names=tuple(map(renamed, x.names))) for x in run.leaves),
            parts=tuple(x._replace(path=renamed(x.path), kind="Part") for x in run.parts),
            calls=tuple(x._replace(path=renamed(x.path), line="x.py:1") for x in run.calls),
        )
        for run in recording.runs
    )
    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    suggestion = suggest(tensors, dataclasses.replace(recording, runs=runs))
    check_found(tensors, suggestion, usual.config.to_dict())
    assert {renamed(row.foreign.replace("{i}", "0")) for row in usual.layout.rows} == {
        row.foreign.replace("{i}", "0") for row in suggestion.layout.rows
    }
