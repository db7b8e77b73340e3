"""Checkpoints of training programs: one file each, and one line each in `TRAINERS`.

Each is known by the names of its code. Facts on names and settings come from the public code of
the programs; nothing of it is copied.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.convert.transfer import jax_leaf, to_params
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers import annotated_transformer, fairseq, joeynmt, opennmt_py
from jax_transformer.porting.trainers.trainer import Trainer, TrainerCheckpoint, as_dict
from jax_transformer.storage import weights as files

if TYPE_CHECKING:
    from jax_transformer.config import TransformerConfig
    from jax_transformer.tokenizers import Tokenizer

TRAINERS: dict[str, Trainer] = {
    "annotated_transformer": annotated_transformer.TRAINER,
    "fairseq": fairseq.TRAINER,
    "joeynmt": joeynmt.TRAINER,
    "opennmt_py": opennmt_py.TRAINER,
}


def from_trainer(
    path: str | os.PathLike,
    trainer: str | None = None,
    *,
    num_heads: int | None = None,
    dtype: str | None = None,
) -> tuple[TransformerConfig, dict[str, Any], Tokenizer | None]:
    """Return the config, the parameters and the tokenizer of a training program's checkpoint.

    Args:
        path: The checkpoint as the program wrote it, with the program's other files (settings,
            vocabularies) beside it: `checkpoint_best.pt` of fairseq with dict.LANGUAGE.txt,
            `best.ckpt` of JoeyNMT with config.yaml, `model_step_N.pt` of OpenNMT-py, or the
            state_dict of The Annotated Transformer.
        trainer: The program, one of "annotated_transformer", "fairseq", "joeynmt" and
            "opennmt_py"; None finds out.
        num_heads: Attention heads, for a program that does not record them; None is the number
            in its code.
        dtype: Floating-point type to convert to; None keeps that of each tensor.

    Returns:
        The config, the parameters as jax arrays, and the tokenizer of lines of tokens with spaces
        between, as the program trained on; None where the vocabulary is not beside the checkpoint.

    Raises:
        InputError: The checkpoint is of none of these programs, or of a model that no config
            expresses; the message names the setting.
        WeightFileError: The file is damaged, or holds objects that are not read.
        ConversionError: The tensors do not fit the settings.
    """
    program, model = read_trainer(path, trainer)
    config = program.config(model, num_heads)
    tokenizer = program.tokenizer(model, config)
    params, _ = to_params(
        model.tensors, config, program.layout, dtype=dtype, leaf=jax_leaf(), consume=True
    )
    return config, params, tokenizer


def read_trainer(
    path: str | os.PathLike, trainer: str | None = None
) -> tuple[Trainer, TrainerCheckpoint]:
    """Return the program and the model of a checkpoint; arguments and errors of `from_trainer`."""
    known = ", ".join(TRAINERS)
    if trainer is not None and trainer not in TRAINERS:
        raise InputError(f"trainer={trainer!r} is unknown; choose one of {known}")
    remedy = f"name its program, one of {known}, to be told how to save it without them"
    if trainer is not None:
        remedy = TRAINERS[trainer].remedy
    checkpoint = files.read_checkpoint(Path(path), remedy)
    content = as_dict(checkpoint.content)
    programs = TRAINERS.values() if trainer is None else [TRAINERS[trainer]]
    program = next((program for program in programs if program.wrote(content)), None)
    if program is None:
        what = trainer or "any of them"
        raise InputError(f"{path}: is no checkpoint of {what}; this library knows {known}")
    return program, program.read(checkpoint)
