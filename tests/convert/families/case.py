"""What the tests of a family need to know about it, and its models with random numbers."""

import copy
import functools
import json
import os

import jax
import numpy as np
import pytest
import torch

from jax_transformer import apply, decode, encode
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.origin import Origin, read_origin
from jax_transformer.model.masks import source_mask
from jax_transformer.storage import weights as weight_files
from jax_transformer.storage.weights.shards import read_weights
from tests.convert.families import bart_lineage, t5_lineage
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.parity.ladder import error
from tests.tokenizers.sentencepiece_models import text, train, write_marian

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")


forward = jax.jit(apply, static_argnames="config")


@functools.partial(jax.jit, static_argnames="config")
def memory_and_logits(params, config, src, tgt):
    memory = encode(params, config, src)
    return memory, decode(params, config, tgt, memory, src_mask=source_mask(src, config))


# The families whose class is in transformers.
CASES = bart_lineage.CASES | t5_lineage.CASES


def foreign_class(model_type):
    return getattr(transformers, FAMILIES[model_type].architecture)


def foreign_model(model_type, shape=None, dtype=torch.float32, **changes):
    """Return a model of transformers whose every leaf is random, the biases and the norms too.

    `shape` is the name of one of the family's, or the arguments of another.
    """
    case = CASES[model_type]
    known = next(iter(case.shapes)) if shape is None else shape
    values = dict(known if isinstance(known, dict) else case.shapes[known]) | changes
    model_class = foreign_class(model_type)
    model = model_class(model_class.config_class(**values)).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    for name, leaf in [*model.named_parameters(), *model.named_buffers()]:
        computed = [table for end, table in case.tables.items() if name.endswith(end)]
        if computed:
            leaf.data = computed[0](*leaf.shape).to(dtype)
        else:
            weight = name.endswith("weight")
            deviation = leaf.shape[-1] ** -0.5 if weight and leaf.ndim > 1 else 0.3
            mean = 1.0 if weight and leaf.ndim == 1 else 0.0  # of a norm's scale
            leaf.data.normal_(mean, deviation, generator=generator)
    if case.finish:
        case.finish(model, values)
    return model


def widened(model, model_type):
    """Return the model in float64 with the same weights; tables of positions are computed anew."""
    wide = copy.deepcopy(model).double()
    t5_lineage.set_exact_norms(wide)
    for name, leaf in [*wide.named_parameters(), *wide.named_buffers()]:
        for end, table in CASES[model_type].tables.items():
            if name.endswith(end):
                leaf.data = table(*leaf.shape).double()
    return wide


def ragged_tokens(config, source_length=13, target_length=11):
    """Return sources padded on the right to different lengths, and targets from the start id."""
    random = np.random.default_rng(0)
    batch = 3
    src = random.integers(6, config.src_vocab_size - 3, (batch, source_length)).astype(np.int32)
    tgt = random.integers(6, config.tgt_vocab_size - 3, (batch, target_length)).astype(np.int32)
    for ids in (src, tgt):
        ids[ids == config.pad_id] = config.eos_id
    for row, length in enumerate((source_length, 5, 1)):
        src[row, length - 1 :] = config.pad_id
        src[row, length - 1] = config.eos_id
    tgt[:, 0] = config.bos_id
    return src, tgt


def as_inputs(config, src):
    return {
        "input_ids": torch.tensor(src, dtype=torch.int64),
        "attention_mask": torch.tensor(src != config.pad_id).long(),
    }


def foreign_results(model, config, src, tgt):
    """Return logits and encoder states (embedded, then after each layer) of transformers."""
    with torch.no_grad():
        result = model(
            **as_inputs(config, src),
            decoder_input_ids=torch.tensor(tgt, dtype=torch.int64),
            output_hidden_states=True,
        )
    return result.logits, result.encoder_hidden_states


def logits_error(params, config, model):
    """Return the error of our logits against those of a model of transformers."""
    src, tgt = ragged_tokens(config)
    return error(forward(params, config, src, tgt), foreign_results(model, config, src, tgt)[0])


def strictly_loaded(model_class, folder):
    """Return what transformers loads from a folder, which must have its tensors and no others."""
    model, report = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def weights_of(folder):
    return weight_files.read(folder / "model.safetensors")


def goes_home(folder, home):
    """Write the model of a folder home, and check that all that is not computed is as it came.

    Returns:
        The config and the parameters.
    """
    config, params = from_huggingface(folder)
    origin, _ = read_origin(folder)
    to_huggingface(params, config, home, origin=Origin.from_bytes(origin.to_bytes()))
    assert read_values(home) == read_values(folder)
    came, computed = read_weights(folder), FAMILIES[origin.model_type].layout.buffers
    own = {n: x for n, x in weights_of(home).items() if n not in [b.foreign for b in computed]}
    assert_same_tensors(own, {name: came[name] for name in own})
    again = from_huggingface(home)
    assert again[0] == config
    assert_same_params(again[1], params)
    return config, params


def read_values(folder):
    return json.loads((folder / "config.json").read_text())


def change_values(folder, **changes):
    """Change keys of a folder's config.json; "absent" removes a key. Return the folder."""
    values = {k: v for k, v in (read_values(folder) | changes).items() if v != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_tokenizer(model_type, folder):
    """Write a tokenizer of the family; return the ids and the vocabulary size of its models."""
    if model_type == "marian":
        size = write_marian(folder, model_max_length=512, source_lang="x", mine=3)
        ids = {"pad_token_id": size - 1, "decoder_start_token_id": size - 1, "eos_token_id": 0}
        return {"vocab_size": size, **ids, "forced_eos_token_id": 0}
    folder.mkdir()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    (folder / "spiece.model").write_bytes(train(text(1), 130, **ids))
    tokenizer = transformers.PegasusTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"vocab_size": len(tokenizer)}
