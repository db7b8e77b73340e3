"""Programs that nobody described are found with every tensor, or refused by what they do."""

import dataclasses
import functools
import linecache
import re

import numpy as np
import pytest

from jax_transformer import convert
from jax_transformer.porting import suggest
from tests.porting import models
from tests.porting.models import SHAPES
from tests.porting.recorded import SHORT, check_home, record, tensors_of
from tests.tiers import tiered

PLACE = re.compile(r"\w+ \(models\.py:(\d+)\)")
FLOATS = (
    "ids.append(rows.to(device))",
    "ids.append(rows if ids else torch.randn(ROWS, length, 11))",
)
SHORTER = "[(7, 5)]"
FAR = dict.fromkeys(("windows", "far_window", "buckets"), "[(17, 13), (150, 141)]")
QUICK = ["fused_heads", "far_window"]
# Of the rest CI runs those that are found or refused in a way of their own; the sweep has all.
SOME = ["wrapped", "modern", "buffers", "one_norm_of_attentions"]
SOME += ["buckets", "one_attention", "rezero", "features"]
SOME += ["fused_rows", "clones", "kernels", "sequence_first", "zeroed_rows", "einsum_kernels"]
SOME += ["padded_inside", "log_softmax", "logit_cap", "score_cap", "rotary_pairs", "view_of_heads"]
SOME += ["softmax_of_queries", "deep_residual", "wide_values", "side_by_side", "layer_memory"]
SOME += ["normed_queries", "shifted_inside", "unbiased_variance"]


@functools.cache
def read(name, lengths=None):
    """Return what a program of `SHAPES` holds, its recording, and what is read of both."""
    shape = SHAPES[name]
    module, changes = shape.module(), [FLOATS] if name == "features" else []
    recording = record(module, lengths=lengths or FAR.get(name, SHORT), changes=changes)
    tensors = tensors_of(module, shape.dropped)
    return tensors, recording, suggest(tensors, recording)


def check_found(tensors, suggestion, fields):
    assert suggestion.fits, suggestion
    check_home(tensors, suggestion)
    assert {name: getattr(suggestion.config, name) for name in fields} == dict(fields)
    assert max(suggestion.errors.values()) < 1e-12


@pytest.mark.parametrize("name", tiered(SHAPES, QUICK, SOME))
def test_a_program_is_found_or_refused_by_its_place(name, tmp_path):
    shape, (tensors, _, suggestion) = SHAPES[name], read(name)
    if shape.refused is None:
        check_found(tensors, suggestion, shape.expected)
        masks = suggestion.layout.masks
        assert (masks.encoder, masks.memory, masks.causal) == (shape.hides, shape.hides, True)
        convert.write_layout(tmp_path / "mine.toml", suggestion.layout, suggestion.config)
        read_back = convert.read_layout(tmp_path / "mine.toml")
        assert read_back == (suggestion.layout, suggestion.config)
        return
    assert not suggestion.fits
    assert suggestion.only_masks == (suggestion.layout is not None) == (name == "far_window")
    (text,) = [text for text in suggestion.refused if shape.refused.text in text][:1]
    lines = [linecache.getline(models.__file__, int(line)) for line in PLACE.findall(text)]
    wanted, module = shape.refused.line, shape.refused.module
    assert any(wanted in line for line in lines) if wanted else not lines, text
    assert not module or re.search(rf" in (.*, )?{module}(,|$)", text), text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["far_window", "buckets"])
def test_what_short_runs_cannot_tell_is_noted(name):
    *_, suggestion = read(name, SHORTER)
    assert suggestion.fits
    assert suggestion.config.sliding_window is None
    assert "up to 7 source and 5 target tokens were seen" in " ".join(suggestion.notes)
    if name == "buckets":
        assert suggestion.config.relative_attention_max_distance == 128
        told = re.search(r"128 is taken, and (\d+) to (\d+) give", " ".join(suggestion.notes))
        assert int(told[1]) <= 20 < 128 <= int(told[2])


@pytest.mark.exhaustive
def test_names_decide_nothing():
    """Each part of each name is another word; numbers, which count layers, stay."""
    tensors, recording, usual = read("wrapped")
    random, words = np.random.default_rng(0), {}

    def renamed(name):
        for part in re.findall(r"[^\W\d][a-z_]*", name):
            words.setdefault(part, "".join(random.choice([*"abcdefghijk"], 9)))
        return re.sub(r"[^\W\d][a-z_]*", lambda found: words[found[0]], name)

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
    check_found(tensors, suggestion, dataclasses.asdict(usual.config))
    assert {renamed(row.foreign.replace("{i}", "0")) for row in usual.layout.rows} == {
        row.foreign.replace("{i}", "0") for row in suggestion.layout.rows
    }
