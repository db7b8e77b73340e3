"""A record: the inputs of a user's own program, and what it computed of them.

A record is written by `snippet`, which runs in the user's program, or by `record_module`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jax_transformer.convert.table import Masks
from jax_transformer.errors import InputError, one_line, shorten
from jax_transformer.parity.observe import observe_torch
from jax_transformer.storage import weights as files
from jax_transformer.storage.weights.arrays import as_numpy, as_torch, own_copy
from jax_transformer.storage.weights.trained import plain_names

if TYPE_CHECKING:
    import torch
    from torch import nn

    from jax_transformer.config import TransformerConfig

NAME = re.compile(r"(?:(0|[1-9][0-9]{0,5})\.)?(src|tgt|logits|block\.(.+))")
PARTS = ("src", "tgt", "logits")
MOST_BATCHES = 100  # each shape of a batch is compiled
OutputKind = Literal["logits", "log_softmax", "softmax"]
SUM_TOLERANCE = 1e-2  # of probabilities that were computed in half precision
# The largest errors that rounding causes: of a program in float64, in float64 with some numbers in
# float32, and in float32.
EXACT, ROUNDED, ROUGH = 1e-11, 5e-7, 1e-5
LARGEST_ID = np.iinfo(np.int32).max

SNIPPET = """\
# Paste this where your program has built `model` and loaded its weights.
import torch
from safetensors.torch import save_file

PAD, SOURCES, TARGETS, S, T = {pad}, {sources}, {targets}, 7, 5  # padding, ids below these, lengths
torch.set_default_dtype(torch.float64)
model.double().eval().requires_grad_()  # with gradients nn.Transformer takes no short cut
device, tensors = next(model.parameters()).device, {{"pad": torch.tensor([PAD])}}

def keep(name, output):  # the first output of the first call
    while isinstance(output, (tuple, list, dict)) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    if torch.is_tensor(output) and output.is_floating_point() and output.numel():
        tensors.setdefault(name, output.detach().cpu().contiguous().clone())

for name, module in model.named_modules():
    if name:
        module.register_forward_hook(lambda _, __, o, n=name: keep(f"{{batch}}.block.{{n}}", o))
for batch, (source, target) in enumerate([(1, 1), (S, T), (S, T)]):
    src, tgt = torch.randint(SOURCES - 1, (3, source)), torch.randint(TARGETS - 1, (3, target))
    src, tgt = src + (src >= PAD), tgt + (tgt >= PAD)  # no token is padding
    if batch == 2:
        src[1, S // 2 :] = src[2, S - 1 :] = tgt[1, T - 1 :] = tgt[2, T // 2 :] = PAD
    tensors |= {{f"{{batch}}.src": src, f"{{batch}}.tgt": tgt}}
    src, tgt = src.to(device), tgt.to(device)
    output = model(src, tgt)  # change this call where yours needs masks, src.T or other arguments
    keep(f"{{batch}}.logits", output)
save_file(tensors, "recorded.safetensors")
"""


class Batch(NamedTuple):
    """One call of the program: B rows of S source and T target positions, V target tokens.

    Attributes:
        src: Source ids [B, S], int32; or vectors [B, S, D] of a model without embeddings.
        tgt: Target ids [B, T], int32; or vectors [B, T, D].
        output: What the program returned [B, T, V].
        blocks: First output of the first call of each module, by the module's name in the
            program. Streams are [B, length, D]; other outputs have the shape that they had.
    """

    src: np.ndarray
    tgt: np.ndarray
    output: np.ndarray
    blocks: dict[str, np.ndarray]

    def tokens(self, pad_id: int | None, bos_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which positions of the source [B, S] and the target [B, T] hold a token."""
        source, target = (
            np.ones(side.shape[:2], bool) if side.ndim == 3 or pad_id is None else side != pad_id
            for side in (self.src, self.tgt)
        )
        if bos_id == pad_id:
            target[:, 0] = True  # BOS is no padding
        return source, target

    def compared(
        self, pad_id: int | None, config: TransformerConfig
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of both sides whose outputs are compared: of rows with a source."""
        source, target = self.tokens(pad_id, config.bos_id)
        target = target & source.any(1, keepdims=True)
        if config.decoder_attention == "self_over_memory" and source.shape == target.shape:
            target = target & source  # a position reads that of the source
        return source, target

    def masks(self, masks: Masks, pad_id: int | None, bos_id: int) -> tuple[np.ndarray, ...]:
        """Return the masks of the encoder, the memory [B, 1, 1, S] and the target [B, 1, T, T]."""
        source, target = self.tokens(pad_id, bos_id)
        source, target = source[:, None, None, :], target[:, None, None, :] | (not masks.target)
        target = np.repeat(target, target.shape[-1], axis=2)
        target = np.tril(target) if masks.causal else target
        return source | (not masks.encoder), source | (not masks.memory), target


class Record(NamedTuple):
    """What a program computed.

    Attributes:
        pad_id: Id of padding in `src` and `tgt`; None where the program has none.
    """

    batches: tuple[Batch, ...]
    pad_id: int | None

    @property
    def is_exact(self) -> bool:
        """Whether the program computed in float64."""
        return all(batch.output.dtype == np.float64 for batch in self.batches)


def output_kind(output: np.ndarray) -> OutputKind:
    """Return what a program returned, by the sums of its numbers [N, V] at N tokens."""
    wide = output.astype(np.float64)
    with np.errstate(over="ignore"):
        if wide.max() <= SUM_TOLERANCE and _is_one(np.exp(wide).sum(-1)):
            return "log_softmax"
    return "softmax" if wide.min() >= 0 and _is_one(wide.sum(-1)) else "logits"


def _is_one(sums: np.ndarray) -> bool:
    return bool(np.all(np.abs(sums - 1) <= SUM_TOLERANCE))


def snippet(pad_id: int = 0, src_vocab_size: int = 10, tgt_vocab_size: int = 10) -> str:
    """Return Python code that writes a record to recorded.safetensors in the user's program.

    It needs torch and safetensors, and a `model` that is called as model(src, tgt). It changes
    the model to float64. It runs three batches of 3 rows: one token a side; 7 source and 5 target
    tokens; the same lengths with padding at the end of two rows.
    """
    return SNIPPET.format(pad=pad_id, sources=src_vocab_size, targets=tgt_vocab_size)


def read_record(path: str | os.PathLike) -> Record:
    """Read a record from a file of tensors, and check that they belong together.

    Args:
        path: A .safetensors, .pt, .pth or .bin file. The tensors of batch 0 are named "0.src",
            "0.tgt", "0.logits" and "0.block.NAME", where NAME is a module of the program; those of
            batch 1 begin with "1.", and so on. One batch alone needs no number: "src". The
            tensor "pad" holds the id of padding.

    Returns:
        The record. What a sequence-first program computed [L, B, D] is turned to [B, L, D].
    """
    tensors = files.read(path)
    if not tensors:
        raise InputError(f"{path}: holds no tensors; write it with the code that suggest prints")
    where = os.fspath(path)
    pad_id = _pad_id(tensors.pop("pad", None), where)
    numbered: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise InputError(
                f"{where}: the name {shorten(name)} is none of src, tgt, logits, block.NAME and "
                "pad, with the number of a batch and a dot before it where there are several"
            )
        numbered.setdefault(match[1] or "", {})[match[2]] = tensor
    if len(numbered) > 1 and "" in numbered:
        raise InputError(f"{where}: some names begin with a batch's number and some do not")
    if len(numbered) > MOST_BATCHES:
        raise InputError(f"{where}: holds {len(numbered)} batches; record {MOST_BATCHES} at most")
    batches = [
        (f"{number}." if number else "", numbered[number])
        for number in sorted(numbered, key=lambda number: int(number or 0))
    ]
    return _record(batches, pad_id, where)


def record_module(
    module: nn.Module,
    src: Any,
    tgt: Any,
    *,
    pad_id: int | None = None,
    call: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any] | None = None,
) -> Record:
    """Run a torch module and return what it and the modules in it computed.

    The module runs in evaluation mode, without gradients, in its own dtype and on its own device.
    Its mode and hooks are afterwards as before.

    Args:
        src: Source ids [B, S] of torch, numpy, jax or lists; or vectors [B, S, D].
        call: Returns the logits of (module, src, tgt), for a module that is not called as
            module(src, tgt): because it needs masks, or ids with the sequence first.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module is a {type(module).__name__}, not a torch.nn.Module")
    if call is None:
        _check_call(module)
    inputs = {"src": _input("src", "", src), "tgt": _input("tgt", "", tgt)}
    parameter = next(module.parameters(), torch.empty(0))
    on_device = [
        as_torch(array).to(parameter.device, torch.int64 if array.ndim == 2 else parameter.dtype)
        for array in inputs.values()
    ]
    kept: dict[str, np.ndarray] = {}

    def keep(name: str, _part: Any, _weights: Any, _inputs: Any, output: Any) -> None:
        if name:
            _keep(kept, f"block.{name}", output)

    with observe_torch(module, keep):
        output = module(*on_device) if call is None else call(module, *on_device)
    _keep(kept, "logits", output)
    where = type(module).__name__
    return _record([("", kept | inputs)], _pad_id(pad_id, where), where)


def _check_call(module: nn.Module) -> None:
    """Refuse a module that is not called as module(src, tgt), and show how to call it."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind("src", "tgt")
    except TypeError as error:
        parameters = [p for p in signature.parameters.values() if not p.kind.name.startswith("VAR")]
        others = [f"{p.name}=..." for p in parameters[2:] if p.default is p.empty]
        arguments = ", ".join(["src", "tgt", *others])
        raise InputError(
            f"{type(module).__name__}.forward{one_line(str(signature))} is not called as "
            f"module(src, tgt): give call=lambda module, src, tgt: module({arguments})"
        ) from error


def _keep(kept: dict[str, np.ndarray], name: str, output: Any) -> None:
    """Keep the first tensor of an output under a name that has none yet."""
    while isinstance(output, tuple | list | Mapping) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    floats = hasattr(output, "is_floating_point") and output.is_floating_point()
    if floats and output.numel() and name not in kept:
        kept[name] = own_copy(as_numpy(output))


def _record(
    batches: Sequence[tuple[str, Mapping[str, np.ndarray]]], pad_id: int | None, where: str
) -> Record:
    """Return the record of tensors by name, with the prefix of their names in the file."""
    read: list[tuple[str, Batch]] = []
    for prefix, tensors in batches:
        if absent := [part for part in PARTS if part not in tensors]:
            names = ", ".join(f"{prefix}{part}" for part in absent)
            raise InputError(f"{where}: holds no {names}; a batch needs src, tgt and logits")
        src, tgt = (_input(f"{prefix}{part}", where, tensors[part]) for part in ("src", "tgt"))
        if len(src) != len(tgt) and src.shape[1] == tgt.shape[1]:  # the program has [L, B]
            src, tgt = src.swapaxes(0, 1), tgt.swapaxes(0, 1)
        if len(src) != len(tgt) or src.shape[2:] != tgt.shape[2:]:
            raise InputError(
                f"{where}: {prefix}src {list(src.shape)} and {prefix}tgt {list(tgt.shape)} do not "
                "belong together; both are [rows, length], with the same number of rows"
            )
        blocks = {
            name.removeprefix("block."): tensor
            for name, tensor in tensors.items()
            if name not in PARTS and _is_float(tensor)
        }
        blocks = {own: blocks[name] for name, own in plain_names(blocks).items()}
        read.append((prefix, Batch(src, tgt, tensors["logits"], blocks)))
    sequence_first = any(
        batch.output.shape[1::-1] == batch.tgt.shape[:2] != batch.output.shape[:2]
        for _, batch in read
    )
    turned: list[Batch] = []
    for prefix, batch in read:
        turned.append(_batch_first(batch, sequence_first, prefix, where))
        _check_output(f"{prefix}logits", where, turned[-1], pad_id)
        if (last := turned[-1].output.shape[2]) != (first := turned[0].output.shape[2]):
            raise InputError(
                f"{where}: {prefix}logits {list(batch.output.shape)} has {last} logits a position, "
                f"but the first batch has {first}"
            )
    return Record(tuple(turned), pad_id)


def _batch_first(batch: Batch, sequence_first: bool, prefix: str, where: str) -> Batch:
    """Return the batch with outputs [B, L, D], whichever axis of them comes first."""
    rows, lengths = len(batch.src), {batch.src.shape[1], batch.tgt.shape[1]}

    def turn(array: np.ndarray) -> np.ndarray:
        first, second = array.shape[:2]
        turnable, right = second == rows and first in lengths, first == rows and second in lengths
        return array.swapaxes(0, 1) if turnable and (sequence_first or not right) else array

    output = batch.output
    if output.ndim == 3:
        output = turn(output)
    if output.ndim != 3 or output.shape[:2] != batch.tgt.shape[:2]:
        raise InputError(
            f"{where}: {prefix}logits {list(batch.output.shape)} does not belong to {prefix}tgt "
            f"{list(batch.tgt.shape)}; it must be [rows, target length, vocabulary]"
        )
    blocks = {
        name: turn(block) if block.ndim == 3 else block for name, block in batch.blocks.items()
    }
    return batch._replace(output=output, blocks=blocks)


def _check_output(name: str, where: str, batch: Batch, pad_id: int | None) -> None:
    """Refuse logits that are no floats, or not finite where there is a token."""
    if not _is_float(batch.output):
        kind = batch.output.dtype
        raise InputError(f"{where}: {name} has dtype {kind}, not a floating-point type")
    finite = np.isfinite(batch.output.astype(np.float64)).all(-1)
    if batch.tgt.ndim == 2 and pad_id is not None:
        finite |= batch.tgt == pad_id  # a program may give anything there
    if not finite.all():
        row, position = (int(index) for index in np.argwhere(~finite)[0])
        raise InputError(
            f"{where}: {name} is not finite at row {row}, position {position}; record what the "
            "program computes before it masks tokens, of rows that begin with a token"
        )


def _input(name: str, where: str, value: Any) -> np.ndarray:
    """Return ids as int32, or vectors as they are."""
    named = f"{where}: {name}" if where else name
    array = as_numpy(value)
    if array.ndim == 3 and _is_float(array) and array.size:
        if not np.isfinite(array.astype(np.float64)).all():
            raise InputError(f"{named} holds vectors that are not finite")
        return array
    if array.ndim != 2 or not array.size or not (_is_float(array) or array.dtype.kind in "iu"):
        raise InputError(
            f"{named} is {array.dtype} {list(array.shape)}; it must be whole numbers [rows, "
            "length], or vectors [rows, length, d_model] of a model without embeddings"
        )
    wrong = array[~((array >= 0) & (array <= LARGEST_ID) & (array == np.floor(array)))]
    if wrong.size:
        raise InputError(f"{named} holds {wrong[0]}, which is no token id: a whole number from 0")
    return array.astype(np.int32)


def _pad_id(value: Any, where: str) -> int | None:
    if value is None:
        return None
    array = as_numpy(value)
    if array.size != 1 or array.dtype.kind not in "iu" or not 0 <= array.item() <= LARGEST_ID:
        raise InputError(f"{where}: pad={shorten(value)} must be one id, a whole number from 0")
    return array.item()


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
