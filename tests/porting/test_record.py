"""Records: the printed code runs in a stranger's program; what it writes is read and checked."""

import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer.errors import InputError
from jax_transformer.porting.record import read_record, record_module, snippet
from jax_transformer.storage import weights as files

PAD, SOURCES, TARGETS, WIDTH = 1, 11, 13, 8


class Pair(nn.Module):
    """Returns a tuple, of which the second part shares memory with the first."""

    def forward(self, x):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)  # not contiguous
        return x, x[:, :1], None


class Awkward(nn.Module):
    """nn.Transformer in a program that does what records must survive."""

    def __init__(self, sequence_first=False):
        super().__init__()
        self.sequence_first = sequence_first
        self.source = nn.Embedding(SOURCES, WIDTH)
        self.target = nn.Embedding(TARGETS, WIDTH)
        self.register_buffer("positions", torch.linspace(0, 1, 8)[:, None])
        self.pair = Pair()
        self.transformer = nn.Transformer(
            WIDTH, 2, 2, 1, 16, dropout=0.5, batch_first=not sequence_first
        )
        self.head = nn.Linear(WIDTH, TARGETS)
        self.in_place = nn.ReLU(inplace=True)

    def forward(self, src, tgt):
        length = tgt.shape[1]
        embedded = self.target(tgt) + self.positions[:length]
        hidden = torch.full((length, length), -torch.inf).triu(1)
        padding = src == PAD
        source, _, _ = self.pair(self.source(src))
        self.pair(source + 1)  # a second call
        if self.sequence_first:
            source, embedded = source.transpose(0, 1), embedded.transpose(0, 1)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        logits = self.head(self.transformer(source, embedded, tgt_mask=hidden, **masks))
        self.in_place(logits.detach().clone())
        torch.zeros(length, length) @ self.target(tgt)  # of the default type
        return logits, {"unused": None}


def awkward(**options):
    torch.manual_seed(0)
    return Awkward(**options)


@pytest.fixture
def default_type():
    """Take back the default type that the code sets in its program."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_type")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("sequence_first", [False, True])
def test_the_snippet_runs_unchanged(sequence_first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = awkward(sequence_first=sequence_first)
    exec(snippet(PAD, SOURCES, TARGETS), {"model": model})
    record = read_record("recorded.safetensors")
    assert record.pad_id == PAD
    one, full, padded = record.batches
    for batch, source, target in ((one, 1, 1), (full, 7, 5), (padded, 7, 5)):
        assert (batch.src.shape, batch.tgt.shape) == ((3, source), (3, target))
        assert batch.output.shape == (3, target, TARGETS)
        assert batch.output.dtype == np.float64
        assert batch.blocks["transformer.encoder.layers.1.self_attn"].shape == (3, source, WIDTH)
        np.testing.assert_array_equal(
            batch.blocks["pair"], model.source(torch.from_numpy(batch.src)).detach()
        )
    assert all((ids != PAD).all() for batch in (one, full) for ids in (batch.src, batch.tgt))
    assert full.src.max() < SOURCES
    assert full.tgt.max() < TARGETS
    assert sorted((padded.src == PAD).sum(1)) == [0, 1, 4]
    assert sorted((padded.tgt == PAD).sum(1)) == [0, 1, 3]
    assert (one.blocks["in_place"] >= 0).all()
    assert (one.blocks["head"] < 0).any()
    again = record_module(model, padded.src, padded.tgt, pad_id=PAD).batches[0]
    np.testing.assert_array_equal(again.output, padded.output)
    assert set(again.blocks) == set(padded.blocks)
    np.testing.assert_array_equal(again.blocks["pair"], padded.blocks["pair"])


def test_a_module_is_left_as_it_was():
    model = awkward().train()
    model.pair.eval()
    src, tgt = [[2, 3, 4], [5, 6, PAD]], torch.tensor([[2, 3], [4, PAD]])
    record = record_module(model, src, tgt, pad_id=PAD)
    batch = record.batches[0]
    assert batch.output.dtype == np.float32
    assert batch.src.dtype == np.int32
    assert batch.blocks["transformer.encoder"].shape == (2, 3, WIDTH)
    assert (model.training, model.head.training, model.pair.training) == (True, True, False)
    assert not any(part._forward_hooks for part in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    plain, _ = model.eval()(torch.tensor(src), tgt)
    np.testing.assert_allclose(batch.output, plain.detach(), atol=1e-5)
    called = record_module(model, src, tgt, call=lambda model, src, tgt: model(src, tgt)[0])
    np.testing.assert_array_equal(called.batches[0].output, batch.output)


class Masked(nn.Module):
    def forward(self, src, trg, src_mask, *, tgt_mask, scale=1.0):
        return src.float()


def test_a_module_that_needs_more_says_how_to_give_it():
    with pytest.raises(InputError) as caught:
        record_module(Masked(), [[1]], [[1]])
    assert str(caught.value) == (
        "Masked.forward(src, trg, src_mask, *, tgt_mask, scale=1.0) is not called as module(src, "
        "tgt): give call=lambda module, src, tgt: module(src, tgt, src_mask=..., tgt_mask=...)"
    )


def tensors(**changed):
    """Return a sound record of one batch, with tensors changed; None takes a tensor out."""
    sound = {
        "src": np.full((3, 7), 2),
        "tgt": np.full((3, 5), 3),
        "logits": np.ones((3, 5, TARGETS)),
        "block.encoder": np.ones((3, 7, WIDTH)),
        "pad": np.array([1]),
    }
    return {name: value for name, value in (sound | changed).items() if value is not None}


def written(path, **changed):
    files.write(path, tensors(**changed))
    return path


def test_a_file_of_one_batch_and_a_torch_file(tmp_path):
    for name in ("record.safetensors", "record.pt"):
        record = read_record(written(tmp_path / name, pad=None))
        assert record.pad_id is None
        (batch,) = record.batches
        assert batch.src.dtype == np.int32
        assert list(batch.blocks) == ["encoder"]


def test_batches_are_in_the_order_of_their_numbers(tmp_path):
    numbered = {
        f"{number}.{name}": value + (name == "src") * number
        for number in (10, 9)
        for name, value in tensors(pad=None).items()
    }
    files.write(tmp_path / "record.safetensors", numbered)
    record = read_record(tmp_path / "record.safetensors")
    assert [batch.src[0, 0] for batch in record.batches] == [11, 12]


def test_what_is_sequence_first_is_turned(tmp_path):
    """A square output follows the others, and attention weights stay as they are."""
    random = np.random.default_rng(0)
    wide = {"0.src": (7, 3), "0.tgt": (5, 3), "0.logits": (5, 3, 4), "0.block.x": (7, 3, 2)}
    square = {"1.src": (7, 5), "1.tgt": (5, 5), "1.logits": (5, 5, 4), "1.block.y": (5, 5, 2)}
    more = {"1.block.weights": (5, 2, 5, 7), "1.block.flat": (25, 2)}
    drawn = {
        name: random.integers(0, 9, shape).astype(int if name[2:] in ("src", "tgt") else float)
        for name, shape in (wide | square | more).items()
    }
    files.write(tmp_path / "record.safetensors", drawn)
    for number, batch in enumerate(read_record(tmp_path / "record.safetensors").batches):
        read = {"src": batch.src, "tgt": batch.tgt, "logits": batch.output}
        read |= {f"block.{name}": block for name, block in batch.blocks.items()}
        for name, array in read.items():
            before = drawn[f"{number}.{name}"]
            turned = before if name in ("block.weights", "block.flat") else before.swapaxes(0, 1)
            np.testing.assert_array_equal(array, turned)


NOT_FINITE = np.ones((3, 5, TARGETS))
NOT_FINITE[2, 4, 1] = np.nan
BAD = {
    "no logits": ({"logits": None}, "holds no logits; a batch needs src, tgt and logits"),
    "fractions": ({"src": np.full((3, 7), 1.5)}, "src holds 1.5, which is no token id"),
    "NaN id": ({"tgt": np.full((3, 5), np.nan)}, "tgt holds nan, which is no token id"),
    "negative": ({"tgt": np.full((3, 5), -2)}, "tgt holds -2, which is no token id"),
    "too large": ({"src": np.full((3, 7), 2**32)}, "src holds 4294967296, which is no"),
    "flat": ({"src": np.full(3, 1)}, r"src is int64 \[3\]; it must be whole numbers \[rows"),
    "truths": ({"src": np.ones((3, 7), bool)}, "src is bool"),
    "vectors": ({"src": np.full((3, 7, 2), np.inf)}, "src holds vectors that are not finite"),
    "one of each": ({"src": np.ones((3, 7, 2))}, "do not belong together"),
    "rows": ({"src": np.full((4, 7), 2)}, r"src \[4, 7\] and tgt \[3, 5\] do not belong"),
    "rows of logits": (
        {"logits": np.ones((4, 5, TARGETS))},
        r"logits \[4, 5, 13\] does not belong to tgt \[3, 5\]",
    ),
    "length of logits": ({"logits": np.ones((3, 6, 9))}, "does not belong to tgt"),
    "axes of logits": ({"logits": np.ones((3, 5))}, "does not belong to tgt"),
    "whole logits": ({"logits": np.ones((3, 5, 9), int)}, "not a floating-point type"),
    "NaN": ({"logits": NOT_FINITE}, "logits is not finite at row 2, position 4"),
    "name": ({"encoder.weight": np.ones(2)}, "the name 'encoder.weight' is none of src"),
    "block without a name": ({"block.": np.ones(2)}, "is none of src"),
    "numbers": ({"0.src": np.ones((3, 7))}, "some names begin with a batch's number"),
    "pads": ({"pad": np.array([1, 2])}, "must be one id"),
    "pad": ({"pad": np.array([-1])}, "must be one id"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_record_is_refused_in_a_line(case, tmp_path):
    changed, message = BAD[case]
    path = written(tmp_path / "record.safetensors", **changed)
    with pytest.raises(InputError, match=message) as caught:
        read_record(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_the_number_of_batches_is_limited(tmp_path):
    files.write(tmp_path / "record.safetensors", {f"{n}.src": np.ones((1, 1)) for n in range(101)})
    with pytest.raises(InputError, match="holds 101 batches; record 100 at most"):
        read_record(tmp_path / "record.safetensors")


def test_batches_have_one_vocabulary(tmp_path):
    numbered = {
        f"{number}.{name}": value[..., : 9 + number] if name == "logits" else value
        for number in (0, 1)
        for name, value in tensors(pad=None).items()
    }
    files.write(tmp_path / "record.safetensors", numbered)
    with pytest.raises(InputError, match=r"1\.logits .* has 10 logits a position, but .* 9"):
        read_record(tmp_path / "record.safetensors")


def test_what_a_program_gives_at_padding_is_not_judged(tmp_path):
    tgt = np.full((3, 5), 3)
    tgt[2, 4] = PAD
    path = written(tmp_path / "record.safetensors", logits=NOT_FINITE, tgt=tgt)
    assert read_record(path).pad_id == PAD
