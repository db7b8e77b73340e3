"""Recordings: what runs as torch runs it is read, and what is wrong is refused in one line."""

import contextlib
import copy
import functools
import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jax_transformer.errors import InputError
from jax_transformer.porting import read_recording, suggest
from jax_transformer.porting.replay import Replay
from tests.porting.recorded import record, tensors_of, write

SIZES = (11, 13)


class Small(nn.Module):
    """Token ids to logits by everything that a recording must survive."""

    def __init__(self, how="plain"):
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(SIZES[0], 8), nn.Embedding(SIZES[1], 8)
        self.head, self.how = nn.Linear(8, SIZES[1]), how
        self.drop = nn.Dropout(0.5)

    def forward(self, src, tgt):
        x, y = self.source(src), self.target(tgt)
        if self.how == "dropout":
            y = nn.functional.dropout(y, training=True)
        if self.how == "in place":
            y.mul_(2).add_(1)
            y[:, 0] = 0
        if self.how == "views":
            table = torch.zeros(tgt.shape[1], 8)
            table[:, 0::2] = torch.arange(4.0)
            table[:, 1::2].add_(3).sin_()
            y = y + table
        if self.how == "lengths":
            longest = (src != 0).sum(1).max().item()
            x = x[:, :longest] * longest
        if self.how == "outside":
            y = torch.special.bessel_j0(y)
        y = y + x.mean(1, keepdim=True)
        return self.head(y.relu())


def check_replayed(module, recording):
    """Each run gives the logits that were recorded, in float64; returns the first one's replay."""
    tensors = tensors_of(module)
    for run in recording.runs:
        replay = Replay(run, tensors)
        np.testing.assert_allclose(replay.value(run.output), run.logits, rtol=1e-5, atol=1e-5)
    return replay


@pytest.mark.parametrize("how", ["in place", "views", "lengths"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_what_was_recorded_is_executed_again(how, mode):
    module = Small(how)
    changes = [("with torch.no_grad(), sdpa", f"with torch.{mode}(), sdpa")]
    recording = record(module, 0, SIZES, changes=changes)
    replay = check_replayed(module, recording)
    run = replay.run
    for call in run.calls:
        if call.name == "mul_":  # what it has overwritten is kept
            before, after = replay.values([call.reads[0], call.outputs[0]])
            np.testing.assert_array_equal(2 * before, after)
    other = np.where(run.tgt == 2, 3, run.tgt)
    with torch.no_grad():
        expected = module(torch.tensor(run.src), torch.tensor(other)).numpy()
    before = max(run.calls[-1].reads)  # what is asked for is there, although a later call reads it
    inner, logits = replay.values([before, run.output], {run.target: other})
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(inner, replay.value(before, {run.target: other}))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: torch.jit.trace(module, (torch.ones(3, 7).long(), torch.ones(3, 5).long())),
        functools.partial(torch.compile, backend="eager"),
    ],
    ids=["trace", "compile"],
)
def test_traced_and_compiled_modules_are_recorded(wrap):
    module = Small("views" if wrap.__class__ is functools.partial else "plain")
    recording = record(wrap(module), 0, SIZES, lengths="[(7, 5)]")
    names = {name.removeprefix("_orig_mod.") for x in recording.runs[0].leaves for name in x.names}
    assert names == tensors_of(module).keys()
    check_replayed(module, recording)


def test_runs_and_ids_are_those_of_the_settings():
    module = Small()
    recording = record(module, 0, SIZES, lengths="[(7, 5), (2, 1)]")
    assert recording.pad_id == 0
    for run, lengths in zip(recording.runs, [(7, 5), (2, 1)], strict=True):
        assert (run.src.shape[1], run.tgt.shape[1]) == lengths
        assert (run.src[0] > 0).all()
        assert (run.src[1:, -1] == 0).all()
        assert run.src.max() < SIZES[0]
    assert not module.training
    assert not any(part._forward_hooks for part in module.modules())
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dropout", "draws random numbers: put the model into evaluation mode by model.eval()"),
        ("outside", "special_bessel_j0.default' is no operation that is read"),
    ],
)
def test_an_operation_that_cannot_be_read_is_named_by_its_line(how, message):
    with pytest.raises(InputError, match=r"\w+ \(test_recording.py:\d+\)") as refused:
        record(Small(how), 0, SIZES)
    assert message in str(refused.value)


def test_other_weights_are_refused():
    module = Small()
    recording, tensors = record(module, 0, SIZES), tensors_of(module)
    for changed, message in (
        ({n: x for n, x in tensors.items() if n != "head.bias"}, r"head.bias \[13\] .* is missing"),
        (tensors | {"head.bias": np.zeros(14)}, r"head.bias \[13\] of the recording is \[14\]"),
    ):
        with pytest.raises(InputError, match=message):
            suggest(changed, recording)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The tensors of a recording, and the JSON of its run."""
    path = tmp_path_factory.mktemp("recording") / "sound.pt"
    write(Small("views"), path, 0, SIZES, lengths="[(7, 5)]")
    tensors = torch.load(path, weights_only=True)
    return tensors, json.loads(bytes(tensors["0.program"].tolist()))


def refused(path, tensors, text=None):
    """Return the one line by which a file is refused; "" where it is read. No memory is lost."""
    if text is not None:
        raw = text if isinstance(text, bytes) else json.dumps(text).encode()
        tensors = tensors | {"0.program": torch.frombuffer(bytearray(raw), dtype=torch.uint8)}
    torch.save(tensors, path)
    said = ""
    tracemalloc.start()
    try:
        read_recording(path)
    except InputError as error:
        said = str(error)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert "\n" not in said
    assert len(said) < 600 + len(str(path))
    return said


# The operation whose row is changed, or "" for the whole JSON; the place in it, what is put there,
# and what the refusal says.
CHANGES = [
    ("", ("leaves", 0, "shape"), [2**40, 2**20], "has a result [3, 7, 1048576], not [3, 7, 8]"),
    ("aten.relu", (4,), [[3, 5, 9]], "has a result [3, 5, 8], not [3, 5, 9]"),
    ("aten.zeros", (4,), [[2**30, 8]], "has a result of more than"),
    ("aten.relu", (1,), [{"value": 10**9}], "reads a value that nothing computed"),
    ("", ("output",), 10**9, "the recorded output is a value that nothing computed"),
    ("aten.relu", (0,), "aten.set_.source_Tensor", "Tensor' is no operation that is read"),
    ("aten.relu", (0,), "aten.from_file.default", "default' is no operation that is read"),
    ("overwrite", (1, 2), [-8, [5, 4], [8, 2]], "outside of its storage"),
    ("overwrite", (1, 3), [0, [2**20, 2**20], [0, 0]], "is no recording"),
    ("", ("calls",), 7, "is no recording"),
    ("", ("leaves",), None, "is no recording"),
]


def put(text, place, value):
    """Put a value into JSON."""
    *path, last = place
    for key in path:
        text = text[key]
    text[last] = value


@pytest.mark.parametrize(("operation", "place", "value", "message"), CHANGES)
def test_a_recording_that_lies_is_refused(operation, place, value, message, sound, tmp_path):
    text = copy.deepcopy(sound[1])
    # Of all of them: what the output does not depend on is not executed.
    rows = [call for call in text["calls"] if operation and call[0].startswith(operation)]
    for row in rows or [text]:
        put(row, place, value)
    assert message in refused(tmp_path / "x.pt", sound[0], text)


def test_what_is_no_recording_is_refused(sound, tmp_path):
    tensors, text = sound
    path = tmp_path / "x.pt"
    assert refused(path, tensors, text) == ""
    for other in ({"head.weight": torch.ones(2, 2)}, {"pad": torch.zeros(1)}, {}):
        assert "is no recording, it has" in refused(path, other)
    few = {name: x for name, x in tensors.items() if name != "0.logits"}
    assert "KeyError('logits')" in refused(path, few)
    assert "it has '99.logits'" in refused(path, tensors | {"99.logits": torch.ones(1)})
    assert "JSONDecodeError" in refused(path, tensors, b"{")
    assert "RecursionError" in refused(path, tensors, b"[" * 200_000)
    path.write_bytes(b"\x80\x02junk")
    with pytest.raises(InputError):
        read_recording(path)


def places(value, path=()):
    """Yield the path of each leaf of JSON, and of each list."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from places(item, (*path, key))


ODD = [None, -1, 0, 3, 10**12, 10**30, 1.5, "x", "aten.relu.default", [], [[]], {}, {"value": 2}]
ODD += [{"value": "x"}, {"dtype": "load"}, {"float": "nan"}, [2**40], True]


@pytest.mark.parametrize("examples", [25, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_any_change_is_refused_in_one_line_or_read(examples, sound, tmp_path):
    tensors, text = sound
    every = [path for path in places(text) if path]

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.tuples(st.sampled_from(every), st.sampled_from(ODD)), min_size=1, max_size=3)
    )
    def check(changes):
        changed = copy.deepcopy(text)
        for path, value in changes:
            with contextlib.suppress(KeyError, IndexError, TypeError):  # it is there no more
                put(changed, path, value)
        refused(tmp_path / "x.pt", tensors, changed)

    check()
