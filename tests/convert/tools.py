"""Comparisons that the conversion tests share."""

import numpy as np
import pytest
import torch

from jax_transformer import convert
from jax_transformer.convert import ConversionError
from jax_transformer.convert.table import flatten
from jax_transformer.storage.weights.arrays import as_numpy
from tests.models import random_params, small_config

LOGIT_BOUNDS = {"float64": 1e-11, "float32": 1e-5}


def same_bits(one, other):
    """Whether two arrays of any framework have the same type, shape and bytes."""
    one, other = as_numpy(one), as_numpy(other)
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and one.tobytes() == other.tobytes()


def assert_same_tensors(one, other):
    assert list(one) == list(other) or set(one) == set(other)
    for name in one:
        assert same_bits(one[name], other[name]), name


def assert_same_params(one, other):
    assert_same_tensors(flatten(one), flatten(other))


def gradient_error(ours, theirs):
    """Return max|a - b| / max|b|; against 1e-3 at least: a key bias has no gradient in theory."""
    ours, theirs = np.asarray(ours), as_numpy(theirs)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / max(1e-3, np.abs(theirs).max())


def target_masks(src, tgt, pad_id):
    """Return boolean torch masks, True = attend: padding of both sides, and causal."""
    length = tgt.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    src_mask = torch.from_numpy(src != pad_id)[:, None, None, :]
    return src_mask, torch.from_numpy(tgt != pad_id)[:, None, None, :] & causal


def reference_case():
    config = small_config("pre_norm", num_encoder_layers=1, num_decoder_layers=1)
    params = random_params(config)
    return config, params, convert.to_torch(params, config)


def refused(tensors, config, layout="reference", **options):
    with pytest.raises(ConversionError) as caught:
        convert.from_torch(tensors, config, layout, **options)
    return caught.value.report
